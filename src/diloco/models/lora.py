"""LoRA: small matrices beside those of a pre-trained model, which alone are trained, averaged and saved. Torch-free
until it is used; the adapters are those of `peft` (the extra `lora`).

A frozen matrix W computes as W + (alpha / rank) · B A, where A is (rank, in), B is (out, rank), and B starts at zero.
The frozen weights never travel: every worker loads them from its own copy of the model, and workers whose copies
differ refuse each other, by a digest that is part of the model's description.
"""

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigError, install_hint
from diloco.models.folders import replace_model_folder, write_json

if TYPE_CHECKING:
    from torch import Tensor, nn

DEFAULT_RANK = 16
"""The rank of the option --lora without a number."""
ALL_LINEAR = "all-linear"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = "default"  # peft's name of the adapter


@dataclass(frozen=True)
class LoraConfig:
    """Train a pre-trained model of transformers (hf:) by LoRA: with `rank`, or without."""

    rank: int | None = None
    """Rank of the adapters (short: --lora for 16, or --lora RANK); none: all weights are trained."""
    alpha: float | None = None
    """What the adapters compute is multiplied by alpha / rank (default: twice the rank)."""
    targets: str | None = None
    """The last parts of the names of the modules that get an adapter, with commas, as in q_proj,v_proj (default:
    every linear layer but the output)."""
    dropout: float | None = None
    """Share of an adapter's inputs that are set to zero in training (default: 0)."""

    def __post_init__(self) -> None:
        if self.rank is None:
            for name in ("alpha", "targets", "dropout"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"lora.{name} = {getattr(self, name)} has no effect without LoRA: add --lora")
            return
        if self.rank < 1:
            raise ConfigError(f"lora.rank = {self.rank} must be at least 1")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise ConfigError(f"lora.alpha = {self.alpha} must be a finite number above 0")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout = {self.dropout} must be at least 0 and below 1")
        if self.targets is not None and not all(self.target_modules):
            raise ConfigError(f"lora.targets = {self.targets!r} has an empty name: give names with commas between them")

    @property
    def used_alpha(self) -> float:
        return 2.0 * (self.rank or 0) if self.alpha is None else self.alpha

    @property
    def target_modules(self) -> list[str]:
        return [] if self.targets is None else [name.strip() for name in self.targets.split(",")]


def check_peft() -> None:
    """Refuse LoRA without the package that has it."""
    if find_spec("peft") is None:
        raise ConfigError(f"LoRA needs the package peft: {install_hint('lora')}")


def add_adapters(inner: Any, config: LoraConfig, name: str) -> None:
    """Freeze a model of transformers and put adapters into it, in place; they are drawn from torch's generator.

    `name`: the model's name in messages.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    linear_names = sorted({path.rpartition(".")[2] for path, module in inner.named_modules() if _is_linear(module)})
    peft_config = PeftConfig(
        r=config.rank or 0,
        lora_alpha=config.used_alpha,
        lora_dropout=config.dropout or 0.0,
        target_modules=config.target_modules or ALL_LINEAR,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # peft sets fan_in_fan_out by itself where it is needed
            inject_adapter_in_model(peft_config, inner, adapter_name=_NAME)
    except ValueError as error:  # of peft: no module has such a name, or one of them is no linear layer
        raise ConfigError(
            f"lora.targets = {config.targets or ALL_LINEAR} does not fit model {name!r}: {_first_line(error)}; its "
            f"linear layers are {', '.join(linear_names) or 'none'}"
        ) from error
    for path, parameter in inner.named_parameters():
        parameter.requires_grad_(_is_adapter(path))


def frozen_digest(inner: "nn.Module") -> str:
    """SHA-256 of all frozen parameters, by name."""
    hasher = hashlib.sha256()
    for name, parameter in sorted(inner.named_parameters()):
        if not parameter.requires_grad:
            hasher.update(name.encode())
            hasher.update(parameter.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()[:32]


def merged_weights(inner: Any) -> "dict[str, Tensor]":
    """Return the state of the model as if it had never had adapters: what they add is in its weights."""
    layers = {path: module for path, module in inner.named_modules() if hasattr(module, "get_delta_weight")}
    merged: dict[str, Tensor] = {}
    for name, tensor in inner.state_dict().items():
        if _is_adapter(name):
            continue
        path, _, last = name.rpartition(".base_layer.")
        if path and last == "weight":
            tensor = tensor + layers[path].get_delta_weight(_NAME).to(tensor.dtype)
        merged[name.replace(".base_layer.", ".")] = tensor
    return merged


def save_adapter(inner: Any, folder: Path, base: str) -> None:
    """Write the adapters as a folder of peft: its configuration and the weights. `base`: the name of the model."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    peft_config = inner.peft_config[_NAME]
    weights = get_peft_model_state_dict(inner, adapter_name=_NAME, save_embedding_layers=False)
    weights = {
        f"base_model.model.{name}": tensor.detach().float().cpu().contiguous() for name, tensor in weights.items()
    }
    changed_fields = {
        "target_modules": sorted(peft_config.target_modules),
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    adapter_config = json.loads(json.dumps(peft_config.to_dict() | changed_fields, default=sorted))
    with replace_model_folder(folder) as new:
        save_file(weights, new / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(new / ADAPTER_CONFIG_FILE, adapter_config)


def description(config: LoraConfig, digest: str) -> dict[str, object]:
    """Return the part of a model's description that adapters add: it must be the same on all workers."""
    return {"lora": asdict(config), "frozen": digest}


def _is_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _is_linear(module: object) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
