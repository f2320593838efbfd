"""`diloco generate RUN "prompt"`: text from a run's model or any model folder, shown as it is written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from diloco.cli.display.live import PipeSafeConsole
from diloco.errors import ConfigError
from diloco.training.records.notes import printable
from diloco.training.records.run_folder import model_folder_of

_TEMPERATURE, _TOP_K = 0.8, 50


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
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(name="--device")] = "auto",
    threads: Annotated[int | None, Parameter(name="--threads")] = None,
) -> None:
    """Continue a prompt.

    Parameters
    ----------
    model
        A run folder, or a model folder.
    prompt
        The text to continue.
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
    device
        Where the model computes; auto takes a CUDA device if there is one.
    threads
        CPU threads; 1 is best on a busy machine (default: all cores).
    """
    folder = model_folder_of(model)
    _check(max_tokens, threads, seed)
    chosen = {"--temperature": temperature, "--top-k": top_k, "--seed": seed}
    useless = [name for name, value in chosen.items() if value is not None]
    if greedy and useless:
        raise ConfigError(f"{useless[0]} has no effect with --greedy: leave out one of the two")
    from diloco.models.text.text_generator import TextGenerator

    console = PipeSafeConsole()
    with console.status("loading the model"):
        generator = TextGenerator(folder, device, threads)
        pieces = generator.generate(
            prompt,
            max_tokens=max_tokens,
            temperature=0.0 if greedy else _TEMPERATURE if temperature is None else temperature,
            top_k=_TOP_K if top_k is None else top_k,
            seed=seed,
        )
    _show(console, prompt, pieces)


def _check(max_tokens: int, threads: int | None, seed: int | None) -> None:
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens} must be at least 1")
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads {threads} must be at least 1")
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"--seed {seed} must be from 0 to 2**63 - 1")


def _show(console: PipeSafeConsole, prompt: str, pieces: Iterator[str]) -> None:
    """Written past rich, which would turn tabs into spaces; to a reader that may go away."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if console.is_terminal and not console.no_color else ("", "")
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
