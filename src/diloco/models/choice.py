"""The table [model] of a run file: a model's name and, for a preset, numbers of its shape. Imports no torch."""

from dataclasses import asdict, dataclass

from diloco.core.options import option
from diloco.errors import ConfigError
from diloco.models.native.config import ModelConfig
from diloco.models.native.presets import preset
from diloco.models.pretrained import (
    CONFIG_FILE,
    check_model,
    is_pretrained,
    read_json,
    stored_parameters,
    uses_transformers,
)


@dataclass(frozen=True)
class ModelChoice:
    """The model of a run. The vocabulary is the tokenizer's, and the longest sequence is data.sequence_length."""

    name: str = option("tiny", may_differ="always")
    """Preset: tiny, 60m, 150m, 400m (the paper's), llama-150m, llama-1b (OpenDiLoCo's). Or a pre-trained model: the
    folder of a Llama, or hf:NAME_OR_PATH for any causal language model of transformers. Short: --model."""
    hidden_size: int | None = None
    """Width of the model; a multiple of num_heads. For a preset, as all keys below: left out, they are the preset's."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers; follows hidden_size in the preset's proportion."""
    num_layers: int | None = None
    """Number of blocks."""
    num_heads: int | None = None
    """Attention heads."""
    num_kv_heads: int | None = None
    """Key/value heads, a divisor of num_heads; follows num_heads in the preset's proportion."""
    head_dim: int | None = None
    """Width of a head, even; hidden_size / num_heads if one of these is given."""
    rope_theta: float | None = None
    """Base of the rotary positions."""
    norm_eps: float | None = None
    """ε of the RMS norms."""
    tie_embeddings: bool | None = None
    """Whether one matrix serves as input and output embeddings."""

    def __post_init__(self) -> None:
        shape = self.shape()
        if not shape:
            return
        if is_pretrained(self.name):
            key, value = next(iter(shape.items()))
            raise ConfigError(
                f"model.{key} = {value} has no effect on the pre-trained model {self.name!r}, which has a shape of its "
                "own: leave it out, or name a preset to train from random weights"
            )
        preset(self.name, shape=shape)

    def shape(self) -> dict[str, int | float | bool]:
        """Return the numbers that are given."""
        return {key: value for key, value in asdict(self).items() if key != "name" and value is not None}

    def num_parameters(self, *, vocab_size: int, sequence_length: int) -> int:
        """Count the parameters without building the model; a pre-trained model's by its files."""
        pretrained = check_model(self.name)
        if pretrained is None:
            return preset(
                self.name, vocab_size=vocab_size, max_sequence_length=sequence_length, shape=self.shape()
            ).num_parameters()
        if uses_transformers(self.name):
            return stored_parameters(pretrained.folder)
        return ModelConfig.from_hf_config(read_json(pretrained.folder / CONFIG_FILE)).num_parameters()

    def __str__(self) -> str:
        return self.name
