"""Our transformer as a LanguageModel: random weights in a preset's shape, or those of a Llama-family folder; and such a
folder written so that `transformers.AutoModelForCausalLM.from_pretrained` loads it.

`config.json`, `model.safetensors` (fp32; tied embeddings once) and, given a tokenizer, its files. Each file appears
whole or not at all. Reads sharded weights too.

Refused: another family than Llama, missing or unexpected tensors (each is named), pickled weights, and a tokenizer
with more tokens than the model has vectors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, final

import torch
from torch import Tensor, nn

from diloco.atomic_files import replace_file
from diloco.errors import ConfigError
from diloco.models.base import LanguageModel, Reader
from diloco.models.folders import write_json
from diloco.models.native.config import ModelConfig
from diloco.models.native.transformer import KeyValueCache, Transformer
from diloco.models.pretrained import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, read_json
from diloco.models.tokenizer_files import check_tokenizer, copy_tokenizer, is_same_tokenizer, write_tokenizer
from diloco.models.weights import read_weights
from diloco.safetensors_files import file_chunks

Kind = TypeVar("Kind", bound=Transformer)


@final
class NativeModel(Transformer, LanguageModel):
    """`Transformer` with the interface of `LanguageModel`; the weights keep their names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.origin: Path | None = None  # the folder of its first weights

    @classmethod
    def load(cls, folder: Path) -> "NativeModel":
        """Load the model of a Llama-family folder."""
        model = load_model(folder, cls)
        model.origin = folder
        return model

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_sequence_length

    @property
    def body(self) -> nn.Module:
        return self.model

    @property
    def description(self) -> str:
        return repr(self.config)

    def reader(self, length: int) -> Reader:
        return _NativeReader(self, length)

    def save(self, folder: Path, *, tokenizer_path: Path | None = None, end_of_text: str | None = None) -> None:
        save_model(self, folder, tokenizer_path=tokenizer_path, end_of_text=end_of_text, origin=self.origin)


@final
class _NativeReader:
    """A context of at most `length` tokens, in a cache that is allocated once."""

    def __init__(self, model: Transformer, length: int) -> None:
        self._model = model
        weight = model.model.embed_tokens.weight
        self._device = weight.device
        shape = replace(model.config, max_sequence_length=length)
        self._cache = KeyValueCache(shape, batch_size=1, device=weight.device, dtype=weight.dtype)

    @property
    def length(self) -> int:
        return self._cache.length

    def read(self, tokens: Sequence[int]) -> Tensor:
        logits: Tensor = self._model(torch.tensor([list(tokens)], device=self._device), self._cache)
        return logits[0, -1]

    def reset(self) -> None:
        self._cache.length = 0


# Folders


def save_model(
    model: Transformer,
    directory: Path,
    *,
    tokenizer_path: Path | None = None,
    end_of_text: str | None = None,
    origin: Path | None = None,
) -> None:
    """Write the model's folder. `end_of_text`: the tokenizer's token at which generation should stop.

    `origin`: the folder that the model came from. If the tokenizer is still that folder's, its files and the special
    tokens of its config.json are kept.
    """
    eos_token_id = None
    if tokenizer_path is not None:
        eos_token_id = check_tokenizer(tokenizer_path, model.config.vocab_size, end_of_text)
    elif end_of_text is not None:
        raise ConfigError(f"end_of_text is {end_of_text!r} without a tokenizer: give tokenizer_path too")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the model folder {directory} cannot be made ({error.strerror}): choose another place"
        ) from error

    # fp32 whatever the training type, as config.json says.
    state = model.state_dict()
    tensors = {name: t.detach().float() for name, t in state.items()}
    with replace_file(directory / WEIGHTS_FILE) as file:
        for chunk in file_chunks(tensors, {"format": "pt"}):
            file.write(chunk)
    config = model.config.hf_config(eos_token_id=eos_token_id)
    if tokenizer_path is not None:
        if origin is not None and is_same_tokenizer(tokenizer_path, origin / TOKENIZER_FILE):
            copy_tokenizer(origin, directory)
            origin_config = read_json(origin / CONFIG_FILE)
            config |= {key: value for key, value in origin_config.items() if key.endswith("_token_id")}
        else:
            write_tokenizer(directory, tokenizer_path, end_of_text, model.config.max_sequence_length)
    write_json(directory / CONFIG_FILE, config)


def load_model(directory: Path, kind: type[Kind] = Transformer) -> Kind:  # type: ignore[assignment]
    """Load the model of such a folder (ours, or a Llama of transformers): CPU, fp32. Draws no random numbers."""
    config = ModelConfig.from_hf_config(read_json(directory / CONFIG_FILE))
    # Old versions of transformers stored these tables; they follow from config.json.
    tensors = {n: t for n, t in read_weights(directory).items() if not n.endswith("rotary_emb.inv_freq")}
    with torch.device("meta"):
        model = kind(config)
    _check_tensors(directory, tensors, model.state_dict())
    model.load_state_dict({name: t.float() for name, t in tensors.items()}, assign=True)
    model.model.reset_rotary(torch.device("cpu"))
    return model


def _check_tensors(directory: Path, tensors: dict[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise unless names and shapes are the model's. Drops a second copy of tied embeddings from `found`."""
    if "lm_head.weight" in tensors and "lm_head.weight" not in expected:
        embeddings = tensors.get("model.embed_tokens.weight")
        if embeddings is not None and torch.equal(tensors["lm_head.weight"], embeddings):
            del tensors["lm_head.weight"]
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {list(tensors[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    problems += [f"{name} holds {t.dtype}, not floats" for name, t in tensors.items() if not t.is_floating_point()]
    if problems:
        raise ConfigError(
            f"the weights in {directory} are not those that its {CONFIG_FILE} describes: {'; '.join(problems)}. "
            f"Use the files of one model, or hf:{directory} to have transformers compute it"
        )
