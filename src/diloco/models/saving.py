"""A model as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads, and back.

`config.json`, `model.safetensors` (fp32; tied embeddings once) and, given a tokenizer, `tokenizer.json` with
a `tokenizer_config.json`. Each file appears whole or not at all: it is written beside its place, then moved.

What it refuses: another family than Llama, missing or unexpected tensors (each is named), pickled weights,
and a tokenizer whose tokens the model has no vectors for.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from diloco.errors import ConfigError
from diloco.models.config import ModelConfig
from diloco.models.transformer import Transformer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save_model(
    model: Transformer,
    directory: Path,
    *,
    tokenizer_path: Path | None = None,
    end_of_text: str | None = None,
) -> None:
    """Write the model's folder. `end_of_text`: the tokenizer's token at which generation should stop."""
    eos_token_id = None
    if tokenizer_path is not None:
        eos_token_id = _check_tokenizer(tokenizer_path, model.config.vocab_size, end_of_text)
    elif end_of_text is not None:
        raise ConfigError(f"end_of_text is {end_of_text!r} without a tokenizer: give tokenizer_path too")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the model folder {directory} cannot be made ({error.strerror}): choose another place"
        ) from error

    # fp32 whatever the training type: that is what config.json says.
    state = model.state_dict()
    tensors = {name: t.detach().to("cpu", torch.float32).contiguous() for name, t in state.items()}
    _replace(directory / WEIGHTS_FILE, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    if tokenizer_path is not None:
        tokenizer_json = tokenizer_path.read_bytes()
        _replace(directory / "tokenizer.json", lambda path: _write(path, tokenizer_json))
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.config.max_sequence_length,
            # Byte-level text round-trips only if decoding does not tidy up spaces.
            "clean_up_tokenization_spaces": False,
            **({} if end_of_text is None else {"eos_token": end_of_text}),
        }
        _replace_json(directory / "tokenizer_config.json", tokenizer_config)
    _replace_json(directory / CONFIG_FILE, model.config.hf_config(eos_token_id=eos_token_id))


def load_model(directory: Path) -> Transformer:
    """The model of such a folder (ours, or a Llama of transformers in one safetensors file): CPU, fp32.

    Draws no random numbers: whoever loads a model finds torch's generator as it was.
    """
    config = _read_config(directory / CONFIG_FILE)
    tensors = _read_weights(directory / WEIGHTS_FILE)
    with torch.device("meta"):
        model = Transformer(config)
    _check_tensors(directory / WEIGHTS_FILE, tensors, model.state_dict())
    model.load_state_dict({name: t.float() for name, t in tensors.items()}, assign=True)
    model.model.reset_rotary(torch.device("cpu"))
    return model


def _read_config(path: Path) -> ModelConfig:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: a model folder has one; check the path") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}): restore the file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: it must be a JSON object; restore the file")
    return ModelConfig.from_hf_config(content)


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: weights are read from one safetensors file; save a sharded "
            f"or pickled model again with transformers' save_pretrained(folder, max_shard_size='100GB')"
        )
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors ({error}): restore the file") from error
    # Tables that old versions of transformers stored; they follow from config.json.
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _check_tensors(path: Path, found: dict[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise unless names and shapes are the model's. Drops a second copy of tied embeddings from `found`."""
    if "lm_head.weight" in found and "lm_head.weight" not in expected:
        embeddings = found.get("model.embed_tokens.weight")
        if embeddings is not None and torch.equal(found["lm_head.weight"], embeddings):
            del found["lm_head.weight"]
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if problems:
        raise ConfigError(
            f"{path} does not hold the tensors that its {CONFIG_FILE} describes: {'; '.join(problems)}. "
            f"Use the two files of one and the same model"
        )


def _check_tokenizer(path: Path, vocab_size: int, end_of_text: str | None) -> int | None:
    """Raise unless the model has a vector for every token; returns the id of `end_of_text`."""
    if not path.is_file():
        raise ConfigError(f"the tokenizer {path} does not exist: give the path of a tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer {path} has token {largest}: the model's vocabulary is 0 to {vocab_size - 1}; "
            f"give the tokenizer that the model was trained with"
        )
    if end_of_text is None:
        return None
    token = tokenizer.token_to_id(end_of_text)
    if token is None:
        raise ConfigError(f"end_of_text is {end_of_text!r}: the tokenizer {path} has no such token")
    return int(token)


def _replace_json(path: Path, content: Mapping[str, object]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    _replace(path, lambda temporary: _write(temporary, text.encode("utf-8")))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make the file beside `path`, then move it there in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
