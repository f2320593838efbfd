"""The outputs of a run: the model folder, and a sample of its text."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from diloco.atomic_files import write_file
from diloco.data.corpus import Corpus
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokenizer_files import CHAT_TEMPLATE_FILES
from diloco.models.base import LanguageModel
from diloco.models.text.generation import Sampling, generate
from diloco.training.config.run import RunConfig
from diloco.training.records.run_folder import MODEL_FOLDER


def write_model(model: LanguageModel, corpus: Corpus, folder: Path) -> None:
    """RUN/model/, with the tokenizer and the chat template of the conversations that it was trained on."""
    tokenizer = corpus.tokenizer_path
    end_of_text = Tokenizer.load(tokenizer).decode([corpus.meta.end_of_text])
    model.save(folder / MODEL_FOLDER, tokenizer_path=tokenizer, end_of_text=end_of_text)
    if corpus.meta.chat_template is not None:  # transformers prefers this file to a template in tokenizer_config.json
        write_file(folder / MODEL_FOLDER / CHAT_TEMPLATE_FILES[0], corpus.meta.chat_template)


def sample(model: LanguageModel, corpus: Corpus, config: RunConfig, tell: Callable[..., None], step: int) -> None:
    """Write a sample as an event, if one is wanted. An error here is no error of the run. It draws from a generator of
    its own: training goes on as if there had been none."""
    wanted = config.training
    if not wanted.sample_tokens:
        return
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    prompt = tokenizer.encode(wanted.sample_prompt) or [corpus.meta.end_of_text]
    sampling = Sampling(generator=torch.Generator().manual_seed(config.seed))
    try:
        tokens = generate(model, prompt, max_new_tokens=wanted.sample_tokens, sampling=sampling)
    except Exception as error:  # noqa: BLE001 - the model is saved
        tell("sample_skipped", reason=str(error), step=step)
    else:
        tell("sample", step=step, prompt=wanted.sample_prompt, text=tokenizer.decode(tokens))


class Samples:
    """Samples during training (`training.sample_interval`), written by one worker of a machine."""

    def __init__(self, config: RunConfig, corpus: Corpus, model: LanguageModel, tell: Callable[..., None]) -> None:
        self._config, self._corpus, self._model, self._tell = config, corpus, model, tell
        self._last: int | None = None

    def after_step(self, step: int) -> float:
        """Write one if a multiple of the interval was reached or jumped over; the seconds that it took."""
        interval, last = self._config.training.sample_interval, self._last
        self._last = step
        if interval is None or step // interval <= (step - 1 if last is None else last) // interval:
            return 0.0
        started = time.monotonic()
        sample(self._model, self._corpus, self._config, self._tell, step)
        return time.monotonic() - started
