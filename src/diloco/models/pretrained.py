"""Names that `--model` accepts, and the facts about a pre-trained model that need no loading. Imports no torch.

    tiny                  a preset: our transformer, random weights
    models/my-llama       a folder of the Llama family: our transformer, its weights
    hf:models/my-gpt2     a folder of any causal language model of `transformers`, computed by `transformers`
    hf:openai/gpt2        the same from the Hugging Face hub, downloaded once

A folder is what `save_pretrained` of transformers writes: config.json, safetensors, tokenizer.json. Refuses pickled
weights, a vocabulary too small for the tokenizer, and sequences longer than the model's.

A model of the hub is downloaded once, afterwards found without a network: safetensors and text files only, never
pickled weights, never code. Every problem (no network, no such model, a gated one) is one ConfigError.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, install_hint
from diloco.models.native.config import ModelConfig
from diloco.models.native.presets import PRESETS, preset

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
_PREFIX = "hf:"
_SMALL_FILES = ["*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_WEIGHT_FILES = ["model*.safetensors"]  # not the copies that some repositories keep for other programs
_NO_ANSWER_SECONDS = 10.0
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")  # names in different families


@dataclass(frozen=True)
class Pretrained:
    """The folder of a pre-trained model, and the sizes in its config.json."""

    name: str
    """The name as the user gave it."""
    folder: Path
    vocab_size: int
    max_sequence_length: int | None

    @property
    def tokenizer(self) -> str:
        """The model's own tokenizer, as data.tokenizer names it."""
        return str(self.folder) if is_local(self.name) else self.name

    def check(self, *, vocab_size: int, sequence_length: int) -> None:
        """Refuse a tokenizer or sequences that the model has no vectors or positions for."""
        if vocab_size > self.vocab_size:
            raise ConfigError(
                f"the tokenizer has {vocab_size} tokens and model {self.name!r} has vectors for {self.vocab_size}: "
                f"use the model's own tokenizer (leave data.tokenizer out)"
            )
        if self.max_sequence_length is not None and sequence_length > self.max_sequence_length:
            raise ConfigError(
                f"data.sequence_length = {sequence_length} is more than the {self.max_sequence_length} tokens that "
                f"model {self.name!r} takes: use --data.sequence_length {self.max_sequence_length}"
            )


def uses_transformers(model: str) -> bool:
    """Whether the model is computed by `transformers`."""
    return model.startswith(_PREFIX)


def is_pretrained(model: str) -> bool:
    """Whether the model starts from trained weights."""
    return uses_transformers(model) or (model not in PRESETS and ("/" in model or Path(model).is_dir()))


def is_local(name: str) -> bool:
    """Whether a name is a path or a preset, and not one on the hub."""
    bare = name.removeprefix(_PREFIX)
    return not uses_transformers(name) or not _could_be_on_the_hub(bare) or Path(bare).expanduser().is_dir()


def short_name(model: str) -> str:
    """Shorten a name to its last part: `gpt2` of `hf:openai/gpt2`."""
    return Path(model.removeprefix(_PREFIX)).name or "model"


def check_model(model: str, *, weights: bool = True) -> Pretrained | None:
    """Refuse a model that cannot be built, without loading it. Returns a pre-trained one; None for a preset.

    With `weights` a model of the hub is downloaded completely, otherwise only its small files.
    """
    if not is_pretrained(model):
        preset(model)
        return None
    if uses_transformers(model) and find_spec("transformers") is None:
        raise ConfigError(f"model {model!r} needs the package transformers: {install_hint('hf')}")
    folder = _folder(model, weights)
    config = read_json(folder / CONFIG_FILE)
    if uses_transformers(model):
        vocab_size, max_sequence_length = _sizes(config, folder / CONFIG_FILE)
    else:
        shape = ModelConfig.from_hf_config(config)
        vocab_size = shape.vocab_size
        max_sequence_length = shape.max_sequence_length
    if weights:
        weight_files(folder)
    return Pretrained(model, folder, vocab_size, max_sequence_length)


def _folder(model: str, weights: bool) -> Path:
    name = model.removeprefix(_PREFIX)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if uses_transformers(model) and _could_be_on_the_hub(name):
            return _from_hub(name, weights)
        hint = f"; for a model of the Hugging Face hub write {_PREFIX}{name}" if _could_be_on_the_hub(name) else ""
        raise ConfigError(f"model {model!r}: there is no folder {folder.absolute()}{hint}")
    if not (folder / CONFIG_FILE).is_file():
        inside = folder / "model"
        hint = f"did you mean {model}/model?" if (inside / CONFIG_FILE).is_file() else "give a model's folder"
        raise ConfigError(f"model {model!r}: {folder} has no {CONFIG_FILE}; {hint}")
    return folder


def _could_be_on_the_hub(name: str) -> bool:
    """Whether a name is like `gpt2` or `owner/gpt2`, which a path never is."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part[0].isalnum() for part in parts)


def _sizes(config: Mapping[str, Any], path: Path) -> tuple[int, int | None]:
    """Return the vocabulary size and the longest sequence; models of text and images have them under text_config."""
    text = config.get("text_config") or config
    vocab_size = text.get("vocab_size")
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"{path} has vocab_size {vocab_size!r}: it must be a whole number; is it a language model?")
    lengths = [text[key] for key in _LENGTHS if isinstance(text.get(key), int) and text[key] > 0]
    return vocab_size, lengths[0] if lengths else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: a model folder has one; check the path") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}): restore the file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: it must be a JSON object; restore the file")
    return content


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model folder; raises if one is missing."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise ConfigError(
            f"{folder / WEIGHTS_FILE} does not exist, nor does {INDEX_FILE}: weights are read from safetensors only; "
            f"save a pickled model again with transformers' save_pretrained"
        )
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index} has no weight_map from tensors to files: restore the file")
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name:
            raise ConfigError(f"{index} names the file {name!r}: a model's files must be in its folder; restore it")
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name} does not exist, but {INDEX_FILE} names it: copy the whole model folder")
    return [folder / name for name in files]


def stored_parameters(folder: Path) -> int:
    """Count the numbers in a model folder's weights, by the headers of its files alone."""
    total = 0
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
            raise ConfigError(
                f"{path} is not a whole safetensors file ({error}): copy the model folder again"
            ) from error
    return total


# The Hugging Face hub


def _from_hub(name: str, weights: bool) -> Path:
    """Download once: a cached model is used unchanged, so that all workers of a machine load the same files."""
    cached = _cached_folder(name)
    if cached is not None and (cached / CONFIG_FILE).is_file():
        try:
            if weights:
                weight_files(cached)
        except ConfigError:
            return _fetch_folder(name, weights=True)  # only the small files are here, or the download was interrupted
        return cached
    return _fetch_folder(name, weights=weights)


def _cached_folder(name: str) -> Path | None:
    """Find the cached folder of `owner/name`, perhaps incomplete; None if there is none. Uses no network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=["config.json"]))
    except (OSError, ValueError):  # not there, or not a valid name
        return None


def _fetch_folder(name: str, *, weights: bool) -> Path:
    """Download the folder of `owner/name`; without `weights` only configuration and tokenizer are fetched."""
    from huggingface_hub import errors, snapshot_download

    patterns = _SMALL_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=_NO_ANSWER_SECONDS))
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"model 'hf:{name}' is gated on the Hugging Face hub: accept its conditions at "
            f"https://huggingface.co/{name} and log in (huggingface-cli login), or give the path of a folder"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(
            f"model 'hf:{name}': the Hugging Face hub has no such model, or it is private, and there is no such "
            f"folder; check the name, or log in (huggingface-cli login)"
        ) from error
    except Exception as error:  # the hub's library passes on any error of its HTTP library
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model 'hf:{name}' cannot be fetched from the Hugging Face hub ({reason}), and it is neither a folder nor "
            f"in the hub's cache here: check the network, or give hf:PATH of a downloaded folder"
        ) from error
