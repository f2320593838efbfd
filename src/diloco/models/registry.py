"""Builds the model that `--model` names. To add a kind of model: a class on models/base.py, a line here."""

from pathlib import Path

import torch

from diloco.errors import ConfigError
from diloco.models.base import LanguageModel
from diloco.models.choice import ModelChoice
from diloco.models.hugging_face import HuggingFaceModel
from diloco.models.lora import LoraConfig
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from diloco.models.pretrained import CONFIG_FILE, check_model, read_json, uses_transformers


def build_model(
    model: ModelChoice | str, *, vocab_size: int, sequence_length: int, lora: LoraConfig | None = None
) -> LanguageModel:
    """Build the chosen or named model on the CPU, fp32, in training mode, for a tokenizer of `vocab_size` tokens.

    A preset takes vocabulary and sequence length as given and draws its weights from torch's global generator. A
    pre-trained model keeps its own, which must be large enough; with `lora` it is frozen, and gets adapters that are
    drawn from that generator.
    """
    choice = model if isinstance(model, ModelChoice) else ModelChoice(model)
    model = choice.name
    pretrained = check_model(model)
    if pretrained is None:
        shape = choice.shape()
        return NativeModel(preset(model, vocab_size=vocab_size, max_sequence_length=sequence_length, shape=shape))
    pretrained.check(vocab_size=vocab_size, sequence_length=sequence_length)
    loaded = HuggingFaceModel.load(pretrained) if uses_transformers(model) else NativeModel.load(pretrained.folder)
    for name, parameter in loaded.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ConfigError(
                f"model {model!r} has weights that are not finite (the first is {name.removeprefix('inner.')}): it can "
                f"be neither trained nor used; restore {pretrained.folder}"
            )
    return _with_adapters(loaded, lora)


def _with_adapters(model: LanguageModel, lora: LoraConfig | None) -> LanguageModel:
    if lora is not None and lora.rank is not None:
        assert isinstance(model, HuggingFaceModel), "RunConfig refuses other models"
        model.add_lora(lora)
    return model


def model_outline(
    model: ModelChoice,
    *,
    vocab_size: int,
    sequence_length: int,
    lora: LoraConfig | None = None,
    device: str = "meta",
) -> LanguageModel:
    """Build the same model without its weights: names and shapes. By default without any memory.

    Only the small files of a model of the hub are fetched.
    """
    pretrained = check_model(model.name, weights=False)
    with torch.device(device):
        if pretrained is None:
            shape = model.shape()
            return NativeModel(
                preset(model.name, vocab_size=vocab_size, max_sequence_length=sequence_length, shape=shape)
            )
        if uses_transformers(model.name):
            random_state = torch.get_rng_state()
            try:
                return _with_adapters(HuggingFaceModel.outline(pretrained), lora)
            finally:
                torch.set_rng_state(random_state)
        return NativeModel(ModelConfig.from_hf_config(read_json(pretrained.folder / CONFIG_FILE)))


def open_model(folder: Path) -> LanguageModel:
    """Open the model of a folder, for generation: our own transformer if it computes this model, else
    `transformers`."""
    try:
        ModelConfig.from_hf_config(read_json(folder / CONFIG_FILE))
    except ConfigError:
        name = f"hf:{folder.absolute()}"
    else:
        name = str(folder.absolute())
    return build_model(name, vocab_size=1, sequence_length=1)
