"""Any causal language model of `transformers` (the extra `hf`) as a model of a run.

Weights are loaded in fp32 from safetensors; code that comes with a model is never run. Dropout follows the model's
config.json, in training only. The loss is computed here from the logits, in fp32, so that it is the same quantity for
every model.

Refused: a folder that `transformers` cannot load completely, quantised weights, a model that is not causal, and a
mixture of experts with a balancing loss, which would not be part of this loss.
"""

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.errors import ConfigError
from diloco.models.base import LanguageModel, Reader
from diloco.models.folders import replace_model_folder
from diloco.models.lora import LoraConfig, add_adapters, frozen_digest, merged_weights
from diloco.models.lora import description as lora_description
from diloco.models.lora import save_adapter as save_lora
from diloco.models.pretrained import TOKENIZER_FILE, Pretrained, is_local, weight_files
from diloco.models.tokenizer_files import check_tokenizer, copy_tokenizer, is_same_tokenizer, write_tokenizer

# Keys of a config that do not affect the computation.
_NOT_COMPUTED = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")

_ROUNDING = 1e-4  # allowed difference of two passes over the same text, relative to the largest logit


@final
class HuggingFaceModel(LanguageModel):
    """A causal language model that `transformers` computes; `inner` holds the weights."""

    def __init__(self, inner: Any, origin: Pretrained) -> None:
        """`inner`: a PreTrainedModel in fp32; `origin`: the folder that it was loaded from."""
        super().__init__()
        self.inner = inner
        self.origin = origin
        self.lora: LoraConfig | None = None
        """The adapters, if only these are trained."""
        self._frozen = ""

    def add_lora(self, config: LoraConfig) -> None:
        """Freeze the weights and put adapters beside them, drawn from torch's generator; before it is trained."""
        add_adapters(self.inner, config, self.origin.name)
        self.lora = config
        if not any(parameter.is_meta for parameter in self.inner.parameters()):
            self._frozen = frozen_digest(self.inner)

    @classmethod
    def load(cls, origin: Pretrained) -> "HuggingFaceModel":
        """Load the model of a folder, on the CPU, in training mode. Leaves torch's generator as it was."""
        from transformers import AutoModelForCausalLM

        load: Any = AutoModelForCausalLM.from_pretrained  # its declared type leaves the report out
        random_state = torch.get_rng_state()
        try:
            with _no_progress_bars():
                inner, report = load(
                    origin.folder,
                    dtype=torch.float32,
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
        except Exception as error:  # transformers raises what the model's own code raises
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"model {origin.name!r} cannot be loaded from {origin.folder} as a causal language model: {reason}"
            ) from error
        finally:
            torch.set_rng_state(random_state)
        _check_loaded(inner, report, origin)
        _check_causal(inner, origin)
        return cls(inner.train(), origin)

    @classmethod
    def outline(cls, origin: Pretrained) -> "HuggingFaceModel":
        """Build the model of a folder's config.json, without its weights, on torch's present default device."""
        from transformers import AutoConfig, AutoModelForCausalLM

        random_state = torch.get_rng_state()
        try:
            config = AutoConfig.from_pretrained(origin.folder, local_files_only=True, trust_remote_code=False)
            inner = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        except Exception as error:  # transformers raises what the model's own code raises
            raise ConfigError(f"model {origin.name!r} cannot be built from {origin.folder}: {error}") from error
        finally:
            torch.set_rng_state(random_state)
        return cls(inner.train(), origin)

    @property
    def vocab_size(self) -> int:
        return int(self.inner.get_input_embeddings().weight.shape[0])

    @property
    def max_sequence_length(self) -> int | None:
        return self.origin.max_sequence_length

    @property
    def body(self) -> nn.Module:
        body: nn.Module = self.inner
        return body

    @property
    def description(self) -> str:
        config = {key: value for key, value in self.inner.config.to_dict().items() if key not in _NOT_COMPUTED}
        if self.lora is not None:
            config |= lora_description(self.lora, self._frozen)
        return json.dumps(config, sort_keys=True, default=str)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits (B, T, V) for what follows each of tokens (B, T), int64."""
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits

    def loss(self, tokens: Tensor, targets: Tensor, learnt: Tensor | None = None) -> Tensor:
        logits = self(tokens).flatten(0, 1)
        wanted_targets = targets.flatten()
        if learnt is not None:
            logits = logits[learnt]
            wanted_targets = wanted_targets[learnt]
        return F.cross_entropy(logits.float(), wanted_targets)

    def reader(self, length: int) -> Reader:  # noqa: ARG002 - its cache grows with the text
        return _TransformersReader(self.inner)

    def save(self, folder: Path, *, tokenizer_path: Path | None = None, end_of_text: str | None = None) -> None:
        from transformers import GenerationConfig

        config = self.inner.config
        keeps_tokenizer = False
        if tokenizer_path is not None:
            eos_token_id = check_tokenizer(tokenizer_path, self.vocab_size, end_of_text)
            keeps_tokenizer = is_same_tokenizer(tokenizer_path, self.origin.folder / TOKENIZER_FILE)
            if not keeps_tokenizer:  # the ids of the former special tokens have another meaning now
                config.bos_token_id = None
                config.eos_token_id = eos_token_id
                config.pad_token_id = None
        if hasattr(self.inner, "generation_config"):
            # transformers refuses to save some published generation configs; the original file is copied below.
            self.inner.generation_config = GenerationConfig.from_model_config(config)
        with replace_model_folder(folder) as new, _no_progress_bars(), _saving_here(self.inner):
            if self.lora is None:
                self.inner.save_pretrained(new)
            else:
                self.inner.save_pretrained(new, state_dict=merged_weights(self.inner))
            weight_files(new)  # raises if transformers wrote no weights
            if keeps_tokenizer:
                copy_tokenizer(self.origin.folder, new)
            elif tokenizer_path is not None:
                write_tokenizer(new, tokenizer_path, end_of_text, self.max_sequence_length)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapters alone, as a folder of peft that names the model it belongs to."""
        assert self.lora is not None, "only a model with adapters has any"
        name = str(self.origin.folder) if is_local(self.origin.name) else self.origin.name
        save_lora(self.inner, folder, name.removeprefix("hf:"))


@contextmanager
def _saving_here(inner: Any) -> Iterator[None]:
    """Let transformers save on this process: by default it saves on rank 0 of torch.distributed only.

    The first worker of each machine saves and, after a loss, a surviving one.
    """
    inner.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del inner.should_save_on_this_rank


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars, which would fill a worker's log, and leak semaphores in a process that exits at
    once."""
    from transformers.utils import logging

    bars: Any = logging  # not typed
    were_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            bars.enable_progress_bar()


def _check_loaded(inner: Any, report: dict[str, Any], origin: Pretrained) -> None:
    """Refuse missing weights, which transformers would initialise at random, and models that cannot be trained here."""
    problems = [f"{name} is missing" for name in sorted(report.get("missing_keys", ()))]
    problems += [f"{name} has another shape" for name in sorted(map(str, report.get("mismatched_keys", ())))]
    if problems:
        raise ConfigError(
            f"the weights in {origin.folder} are not those of a {type(inner).__name__}: {'; '.join(problems)}; give a "
            f"folder of a causal language model, saved whole"
        )
    if getattr(inner, "is_quantized", False):
        raise ConfigError(
            f"model {origin.name!r} has quantised weights: they cannot be trained; give the original model"
        )
    if getattr(inner.config, "output_router_logits", False):
        raise ConfigError(
            f"model {origin.name!r} asks for a router's balancing loss (output_router_logits), which is not computed "
            f"here: set it to false in {origin.folder / 'config.json'} to train without it"
        )
    short = sorted({str(p.dtype) for p in inner.parameters() if p.dtype != torch.float32})
    if short:
        raise ConfigError(f"model {origin.name!r} has weights of {', '.join(short)} that do not load in fp32")


def _check_causal(inner: Any, origin: Pretrained) -> None:
    """Refuse a model whose logits depend on later tokens: transformers loads a BERT as causal, for example."""
    inner.eval()
    rows = int(inner.get_input_embeddings().weight.shape[0])
    text = torch.arange(min(4, origin.max_sequence_length or 4))[None] % rows
    changed_text = text.clone()
    changed_text[0, -1] = (changed_text[0, -1] + 1) % rows
    with torch.no_grad():
        logits, changed_logits = (inner(input_ids=x, use_cache=False).logits[0, :-1] for x in (text, changed_text))
    if bool(((logits - changed_logits).abs() > _ROUNDING * logits.abs().amax(-1, keepdim=True)).any()):
        raise ConfigError(
            f"model {origin.name!r} is not causal: what it predicts depends on later tokens; give a causal language "
            f"model (a {type(inner).__name__} may be one with is_decoder true in config.json, trained that way)"
        )


@final
class _TransformersReader:
    """A context with the model's own cache; a model without a cache reads the whole text at each token."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._cached = "past_key_values" in inspect.signature(inner.forward).parameters
        self._device = next(inner.parameters()).device
        self.reset()

    def reset(self) -> None:
        self._text: list[int] = []
        self._past: Any = None

    @property
    def length(self) -> int:
        return len(self._text)

    def read(self, tokens: Sequence[int]) -> Tensor:
        self._text += tokens
        if self._cached:
            ids = torch.tensor([list(tokens)], device=self._device)
            output = self._inner(input_ids=ids, past_key_values=self._past, use_cache=True)
            self._past = output.past_key_values
        else:
            output = self._inner(input_ids=torch.tensor([self._text], device=self._device), use_cache=False)
        logits: Tensor = output.logits[0, -1]
        return logits
