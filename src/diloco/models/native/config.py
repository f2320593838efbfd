"""The shape of a model: the numbers that determine its tensors.

The family is Llama's: RMSNorm, rotary positions, SwiGLU, grouped key/value heads, no biases. `hf_config`
writes the `config.json` with which `transformers` loads the same weights; `from_hf_config` reads one.

Refused: a shape that `transformers` would not load, and a Llama variant (biases, another activation, scaled rotary
positions) that `Transformer` does not compute. This file imports no torch, so that the command line can check a model
in milliseconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.errors import ConfigError

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_sequence_length",
)

# The only values that `Transformer` computes; also the defaults of keys missing from a config.json.
_FIXED_IN_HF: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "attention_dropout": 0.0,
}
_OTHERWISE = "to have transformers compute the model, name it hf:PATH"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder-only transformer. num_heads · head_dim may differ from hidden_size."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_sequence_length: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"model.{name} is {value!r}: it must be a whole number of at least 1")
        if not isinstance(self.tie_embeddings, bool):
            raise ConfigError(f"model.tie_embeddings is {self.tie_embeddings!r}: it must be true or false")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"model.{name} is {value!r}: it must be a number above 0")
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"model.{name} is {value!r}: it must be finite and above 0")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads is {self.num_heads} and model.num_kv_heads is {self.num_kv_heads}: each "
                f"key/value head serves the same number of heads; set num_kv_heads to a divisor of num_heads"
            )
        if self.hidden_size % self.num_heads:
            # Our computation does not need it (head_dim is free); transformers refuses to load without it.
            raise ConfigError(
                f"model.hidden_size is {self.hidden_size} and model.num_heads is {self.num_heads}: "
                f"transformers loads only hidden sizes that are a multiple of the heads; set hidden_size "
                f"to {math.ceil(self.hidden_size / self.num_heads) * self.num_heads}, or change num_heads"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim is {self.head_dim}: rotary positions turn pairs of values, so it must be "
                f"even; set it to {self.head_dim + 1}"
            )

    def num_parameters(self) -> int:
        """Count the parameters of `Transformer(self)`; tied embeddings count once."""
        query_width = self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query_width + 2 * kv_width)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + norms) + self.hidden_size

    def hf_config(self, *, bos_token_id: int | None = None, eos_token_id: int | None = None) -> dict[str, object]:
        """Return the `config.json` of a Hugging Face `LlamaForCausalLM` with these weights.

        The token ids are written even when None: left out, transformers assumes 1 and 2, which are ordinary
        tokens of another vocabulary.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_sequence_length,
            "rope_theta": self.rope_theta,  # where transformers 4 looks
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},  # transformers 5
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "float32",
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            **_FIXED_IN_HF,
        }

    @classmethod
    def from_hf_config(cls, hf: Mapping[str, object]) -> "ModelConfig":
        """Read the shape in a Llama `config.json`; refuses a model that `Transformer` does not compute."""
        _check_family(hf)
        heads = _whole(hf, "num_attention_heads")
        hidden_size = _whole(hf, "hidden_size")
        return cls(
            vocab_size=_whole(hf, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_whole(hf, "intermediate_size"),
            num_layers=_whole(hf, "num_hidden_layers"),
            num_heads=heads,
            # The defaults of transformers' LlamaConfig, for files that leave these out.
            num_kv_heads=_whole(hf, "num_key_value_heads", default=heads),
            head_dim=_whole(hf, "head_dim", default=hidden_size // heads),
            max_sequence_length=_whole(hf, "max_position_embeddings", default=2048),
            rope_theta=_rope_theta(hf),
            norm_eps=_number(hf.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            tie_embeddings=hf.get("tie_word_embeddings", False) is True,
        )


def _check_family(hf: Mapping[str, object]) -> None:
    if hf.get("model_type") != "llama":
        raise ConfigError(
            f"config.json has model_type {hf.get('model_type')!r}: only 'llama' is computed here; {_OTHERWISE}"
        )
    for key, expected in _FIXED_IN_HF.items():
        if hf.get(key, expected) != expected:
            raise ConfigError(f"config.json has {key} {hf[key]!r}: only {expected!r} is computed here; {_OTHERWISE}")


def _rope_theta(hf: Mapping[str, object]) -> float:
    parameters = hf.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or parameters.get("rope_type", "default") != "default":
        raise ConfigError(
            f"config.json has rope_parameters {parameters!r}: only rope_type 'default' is computed here; {_OTHERWISE}"
        )
    return _number(parameters.get("rope_theta", hf.get("rope_theta", 10000.0)), "rope_theta")


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"config.json has {key} {value!r}: it must be a number; repair the file")
    return float(value)


def _whole(hf: Mapping[str, object], key: str, *, default: int | None = None) -> int:
    value = hf.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json has {key} {value!r}: it must be a whole number of at least 1; repair the file")
    return value
