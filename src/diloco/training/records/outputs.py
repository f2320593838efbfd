"""The outputs of a run: the model folder, and a sample of its text."""

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from diloco.atomic_files import write_file
from diloco.data.corpus import Corpus
from diloco.data.sources.chat_template import ChatTemplate
from diloco.data.tokenizer import CHAT_TEMPLATE_FILES, Tokenizer, find_tokenizer
from diloco.errors import DataError
from diloco.history.events import Emit, SampleEvent, SampleSkippedEvent
from diloco.models.base import LanguageModel
from diloco.models.generation import Sampling, generate
from diloco.models.hugging_face import HuggingFaceModel
from diloco.training.config.run import RunConfig
from diloco.training.records.run_folder import ADAPTER_FOLDER, MODEL_FOLDER

_GREETING = "Hello!"
_QUESTION_TOKENS = 1 << 16  # of the validation text that are looked through


def write_model(model: LanguageModel, corpus: Corpus, folder: Path) -> None:
    """Write RUN/model/, with the tokenizer and the chat template of the conversations that it was trained on. With LoRA
    the adapters are merged into it, and RUN/adapter/ has them alone."""
    tokenizer = corpus.tokenizer_path
    end_of_text = Tokenizer.load(tokenizer).decode([corpus.meta.end_of_text])
    model.save(folder / MODEL_FOLDER, tokenizer_path=tokenizer, end_of_text=end_of_text)
    if isinstance(model, HuggingFaceModel) and model.lora is not None:
        model.save_adapter(folder / ADAPTER_FOLDER)
    if corpus.meta.chat_template is not None:  # transformers prefers this file to a template in tokenizer_config.json
        write_file(folder / MODEL_FOLDER / CHAT_TEMPLATE_FILES[0], corpus.meta.chat_template)


def sample(model: LanguageModel, corpus: Corpus, config: RunConfig, emit: Emit, step: int) -> None:
    """Write a sample as an event, if one is wanted. An error here is no error of the run. The sample draws from a
    generator of its own: training goes on as if there had been none."""
    wanted = config.training
    if not wanted.sample_tokens:
        return
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    sampling = Sampling(generator=torch.Generator().manual_seed(config.seed))
    try:
        prompt = sample_prompt(corpus, config, tokenizer)
        tokens = generate(
            model, prompt.tokens, max_new_tokens=wanted.sample_tokens, sampling=sampling, stop_tokens=prompt.stop_tokens
        )
        text = tokenizer.decode(tokens)
    except Exception as error:  # noqa: BLE001 - the model is saved
        emit(SampleSkippedEvent(reason=str(error), step=step))
    else:
        emit(SampleEvent(step=step, prompt=prompt.text, text=text.partition(prompt.end)[0] if prompt.end else text))


class SamplePrompt(NamedTuple):
    """The beginning of a sample; in a run on conversations up to where the assistant's message begins."""

    tokens: list[int]
    text: str
    """The beginning as it is shown."""
    stop_tokens: frozenset[int] = frozenset()
    end: str = ""
    """The sample ends before this text."""


def sample_prompt(corpus: Corpus, config: RunConfig, tokenizer: Tokenizer) -> SamplePrompt:
    """Return `training.sample_prompt`, in a run on conversations as the user's message. If it is empty: the start of a
    text; if only answers are learnt, the first question of the validation text; else a greeting."""
    given = config.training.sample_prompt
    end_of_text = corpus.meta.end_of_text
    template = _template(corpus, config)
    end = "" if template is None else template.answer_end()
    first = tokenizer.encode_chats([end], special=True)[0][0][:1] if end else []
    stops = frozenset([end_of_text]) if corpus.meta.masked or template is not None else frozenset()
    if end and tokenizer.decode(first) == end:  # one token that stands for it
        stops |= set(first)
    if not given and corpus.meta.masked:
        tokens = first_question(corpus, config.data.sequence_length)
        if tokens:
            return SamplePrompt(tokens, tokenizer.decode(tokens), stops, end)
    if template is not None:
        text = template.ask([{"role": "user", "content": given or _GREETING}])
        return SamplePrompt(tokenizer.encode_chats([text], special=True)[0][0], text, stops, end)
    return SamplePrompt(tokenizer.encode(given) or [end_of_text], given, stops, end)


def _template(corpus: Corpus, config: RunConfig) -> ChatTemplate | None:
    """Return the template of the conversations that the corpus was made from; None if it was made from texts."""
    source = corpus.meta.chat_template
    if source is None or config.data.format == "completion":
        return None
    files = [config.data.tokenizer, corpus.tokenizer_path]  # the latter may not name all special tokens
    special: dict[str, str] = {}
    for file in reversed(files):
        if file is not None:
            with suppress(DataError):  # the tokenizer that prepared the text was at another place
                special |= find_tokenizer(file).special_tokens
    return ChatTemplate(source, special, "the chat template of the corpus")


def first_question(corpus: Corpus, longest: int) -> list[int]:
    """Return the tokens of the validation text's first conversation up to its first answer; only the last of them, if
    they are more than three quarters of the `longest` sequence. Empty if the text begins with an answer."""
    bit = corpus.mask_bit
    assert bit is not None, "a corpus in which only some tokens are learnt"
    beginning = np.asarray(corpus.validation()[:_QUESTION_TOKENS], np.int64)
    learnt = np.flatnonzero(beginning & bit == 0)
    question = beginning[: learnt[0]] if len(learnt) else beginning[:0]
    return [int(token) for token in (question & ~bit)[-max(1, 3 * longest // 4) :]]


class Samples:
    """Samples during training (`training.sample_interval`), written by one worker of a machine."""

    def __init__(self, config: RunConfig, corpus: Corpus, model: LanguageModel, emit: Emit) -> None:
        self._config = config
        self._corpus = corpus
        self._model = model
        self._emit = emit
        self._last: int | None = None

    def after_step(self, step: int) -> float:
        """Write a sample if a multiple of the interval was reached or jumped over; return the seconds that it took."""
        interval = self._config.training.sample_interval
        last = self._last
        self._last = step
        if interval is None or step // interval <= (step - 1 if last is None else last) // interval:
            return 0.0
        started = time.monotonic()
        sample(self._model, self._corpus, self._config, self._emit, step)
        return time.monotonic() - started
