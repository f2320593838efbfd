"""`diloco generate RUN "prompt"` and `diloco chat RUN`: text from a run's model or any model folder, shown as it is
written.

A model with a chat template gets a prompt as the user's message, written by that template, and its answer ends where
the template ends one. A conversation that outgrows the model's window loses its oldest messages, and says so.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.cli.display.live import PipeSafeConsole
from diloco.data.sources.chat_template import ChatTemplate, folder_template
from diloco.errors import ConfigError
from diloco.history.notes import printable
from diloco.models.pretrained import TOKENIZER_FILE
from diloco.training.records.run_folder import model_folder_of

if TYPE_CHECKING:
    from diloco.models.text_generator import TextGenerator

_TEMPERATURE = 0.8
_TOP_K = 50


def generate(
    model: Path,
    prompt: str,
    /,
    *,
    max_tokens: Annotated[int, Parameter(name="--max-tokens")] = 200,
    temperature: Annotated[float | None, Parameter(name="--temperature")] = None,
    top_k: Annotated[int | None, Parameter(name="--top-k")] = None,
    seed: Annotated[int | None, Parameter(name="--seed")] = None,
    greedy: Annotated[bool, Parameter(name="--greedy")] = False,
    raw: Annotated[bool, Parameter(name="--raw")] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(name="--device")] = "auto",
    threads: Annotated[int | None, Parameter(name="--threads")] = None,
) -> None:
    """Continue a prompt; a model with a chat template answers it.

    Parameters
    ----------
    model
        A run folder, or a model folder.
    prompt
        The text to continue, or the user's message.
    max_tokens
        Write at most this many tokens.
    temperature
        Above 1 more surprising, below 1 less (default 0.8).
    top_k
        Choose among this many of the likeliest tokens (default 50).
    seed
        The same seed writes the same text (default: another text each time).
    greedy
        Always take the likeliest token.
    raw
        Continue the prompt as it is, without the model's chat template.
    device
        Where the model computes; auto takes a CUDA device if there is one.
    threads
        CPU threads; 1 is best on a busy machine (default: all cores).
    """
    folder = model_folder_of(model)
    choice = _choice(max_tokens, temperature, top_k, seed, greedy, threads)
    template = folder_template(folder) if _has_tokenizer(folder) else None
    if raw and template is None:
        raise ConfigError(f"--raw has no effect: {folder} has no chat template; leave it out")
    console = PipeSafeConsole()
    with console.status("loading the model"):
        generator = _open(folder, device, threads)
        if template is None or raw:
            pieces = generator.generate(prompt, **choice.of_answer(0))
        else:
            if not prompt.strip():
                raise ConfigError(f"the prompt {prompt!r} is empty: give some text")
            conversation = template.ask([{"role": "user", "content": prompt}])
            pieces = generator.answer(conversation, template.answer_end(), **choice.of_answer(0))
    _show(console, prompt if template is None or raw else "", pieces)


def chat(
    model: Path,
    /,
    *,
    system: Annotated[str | None, Parameter(name="--system")] = None,
    max_tokens: Annotated[int, Parameter(name="--max-tokens")] = 500,
    temperature: Annotated[float | None, Parameter(name="--temperature")] = None,
    top_k: Annotated[int | None, Parameter(name="--top-k")] = None,
    seed: Annotated[int | None, Parameter(name="--seed")] = None,
    greedy: Annotated[bool, Parameter(name="--greedy")] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(name="--device")] = "auto",
    threads: Annotated[int | None, Parameter(name="--threads")] = None,
) -> None:
    """Talk with a run's model: a message a line, with or without a terminal.

    In a terminal, /new begins a new conversation, Ctrl-C ends an answer, and Ctrl-D or /exit ends the program.

    Parameters
    ----------
    model
        A run folder, or a model folder; with a chat template.
    system
        The system message that every conversation begins with (default: none).
    max_tokens
        An answer has at most this many tokens.
    temperature
        Above 1 more surprising, below 1 less (default 0.8).
    top_k
        Choose among this many of the likeliest tokens (default 50).
    seed
        The same seed and messages give the same answers (default: others each time).
    greedy
        Always take the likeliest token.
    device
        Where the model computes; auto takes a CUDA device if there is one.
    threads
        CPU threads; 1 is best on a busy machine (default: all cores).
    """
    folder = model_folder_of(model)
    choice = _choice(max_tokens, temperature, top_k, seed, greedy, threads)
    template = folder_template(folder) if _has_tokenizer(folder) else None
    if template is None:
        raise ConfigError(
            f"{folder} has no chat template, so it cannot be talked with: train on conversations (--data.format chat, "
            f"with --data.chat_template chatml if the tokenizer has no template), or continue a text with "
            f"`diloco generate`"
        )
    console = PipeSafeConsole()
    with console.status("loading the model"):
        generator = _open(folder, device, threads)
    at_terminal = console.is_terminal and sys.stdin.isatty()
    if at_terminal:
        console.print(Text("/new: a new conversation, /exit or Ctrl-D: the end", style="dim"))
    conversation = _Conversation(generator, template, choice, system)
    for message in _messages(console, at_terminal):
        if at_terminal and message == "/exit":
            return
        if at_terminal and message == "/new":
            conversation = _Conversation(generator, template, choice, system)
        else:
            _answer(console, conversation, message, at_terminal)


class _Conversation:
    """The messages so far, of which the oldest are dropped when the model's window is full."""

    def __init__(
        self, generator: "TextGenerator", template: ChatTemplate, choice: "_Choice", system: str | None
    ) -> None:
        self._generator = generator
        self._template = template
        self._choice = choice
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = []
        self._answers = 0
        self._end = template.answer_end()

    def ask(self, message: str) -> tuple[Iterator[str], int]:
        """Return the answer to the user's message, in pieces, and how many of the oldest messages were dropped for
        it."""
        self._messages.append({"role": "user", "content": message})
        dropped = 0
        while not self._generator.fits(text := self._template.ask(self._system + self._messages)):
            if len(self._messages) == 1:
                self._messages.pop()
                raise ConfigError("this message does not fit the model's window: send a shorter one")
            del self._messages[:2]  # a question and its answer
            dropped += 2
        return self._generator.answer(text, self._end, **self._choice.of_answer(self._answers)), dropped

    def answered(self, text: str) -> None:
        """Note the assistant's message, whole or cut short by the user."""
        self._messages.append({"role": "assistant", "content": text})
        self._answers += 1


def _messages(console: PipeSafeConsole, at_terminal: bool) -> Iterator[str]:
    """Yield the user's messages: lines that are not empty."""
    if at_terminal:
        import readline  # noqa: F401 - input() then has a history and can be edited
    while not console.quiet:
        try:
            line = input("> ") if at_terminal else sys.stdin.readline()
        except EOFError:
            console.file.write("\n")
            return
        if not line and not at_terminal:
            return
        if line.strip():
            yield line.strip()


def _answer(console: PipeSafeConsole, conversation: _Conversation, message: str, at_terminal: bool) -> None:
    try:
        pieces, dropped = conversation.ask(message)
    except ConfigError as error:
        if not at_terminal:
            raise
        console.print(Text(str(error), style="red"), soft_wrap=True)
        return
    if dropped:
        _note(f"the window is full: the {dropped} oldest messages are left out")
    written: list[str] = []
    try:
        _show(console, "", _kept(pieces, written))
    except KeyboardInterrupt:
        if not at_terminal:
            raise
    conversation.answered("".join(written).strip())


def _kept(pieces: Iterator[str], written: list[str]) -> Iterator[str]:
    for piece in pieces:
        written.append(piece)
        yield piece


def _note(text: str) -> None:
    Console(stderr=True).print(Text(f"note: {text}", style="yellow"), soft_wrap=True)


@dataclass(frozen=True)
class _Choice:
    """How tokens are chosen."""

    max_tokens: int
    temperature: float
    top_k: int
    seed: int | None

    def of_answer(self, number: int) -> dict[str, Any]:
        """Return the arguments for one text; with a seed, the texts of a conversation draw differently."""
        seed = None if self.seed is None else (self.seed + number) % 2**63
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_k": self.top_k, "seed": seed}


def _choice(
    max_tokens: int,
    temperature: float | None,
    top_k: int | None,
    seed: int | None,
    greedy: bool,
    threads: int | None,
) -> _Choice:
    _check(max_tokens, threads, seed)
    chosen = {"--temperature": temperature, "--top-k": top_k, "--seed": seed}
    useless = [name for name, value in chosen.items() if value is not None]
    if greedy and useless:
        raise ConfigError(f"{useless[0]} has no effect with --greedy: leave out one of the two")
    heat = _TEMPERATURE if temperature is None else temperature
    return _Choice(max_tokens, 0.0 if greedy else heat, _TOP_K if top_k is None else top_k, seed)


def _open(folder: Path, device: str, threads: int | None) -> "TextGenerator":
    from diloco.models.text_generator import TextGenerator  # imports torch

    return TextGenerator(folder, device, threads)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILE).is_file()


def _check(max_tokens: int, threads: int | None, seed: int | None) -> None:
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens} must be at least 1")
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads {threads} must be at least 1")
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"--seed {seed} must be from 0 to 2**63 - 1")


def _show(console: PipeSafeConsole, prompt: str, pieces: Iterator[str]) -> None:
    """Write the text past rich, which would turn tabs into spaces; its reader may go away."""
    shown_bold = prompt and console.is_terminal and not console.no_color
    bold, plain = ("\x1b[1m", "\x1b[0m") if shown_bold else ("", "")
    try:
        console.file.write(f"{bold}{printable(prompt)}{plain}")
        console.file.flush()
        for piece in pieces:
            console.file.write(printable(piece))
            console.file.flush()
        console.file.write("\n")
        console.file.flush()
    except BrokenPipeError:
        console.on_broken_pipe()
    except KeyboardInterrupt:
        console.file.write("\n")
        raise
