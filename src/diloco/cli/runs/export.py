"""`diloco export RUN --to DIR`: a run's model, or that of a checkpoint, as a folder to give away, with a model card.

Of a run with LoRA that is the model with the adapters merged into it or, with --adapter, the adapters alone."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.cli.config_parser import parse_config
from diloco.errors import ConfigError, DiLoCoError
from diloco.history.run_history import history_until
from diloco.models.folders import check_unused
from diloco.training.config.run_file import merge, read_run_file
from diloco.training.records.model_card import model_card
from diloco.training.records.run_folder import ADAPTER_FOLDER, MODEL_FOLDER, RUN_FILE, check_run_folder, run_model
from diloco.training.records.summary import read_summary, summarize

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def export(
    run: Path,
    /,
    *,
    to: Annotated[Path, Parameter(name="--to")],
    checkpoint: Annotated[str | None, Parameter(name="--checkpoint")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Parameter(name="--dtype")] = "float32",
    max_shard_size: Annotated[str, Parameter(name="--max-shard-size")] = "5GB",
    adapter: Annotated[bool, Parameter(name="--adapter")] = False,
) -> None:
    """Write a run's model as a folder that transformers loads.

    Parameters
    ----------
    run
        A run folder.
    to
        The folder to write; it must not exist, or be empty.
    checkpoint
        Of a run that has not ended, too: `latest`, or the inner step of a checkpoint. By default the model at the end.
    dtype
        The type of the weights: float32, bfloat16 or float16.
    max_shard_size
        Weights above this size are cut into several files.
    adapter
        Of a run with LoRA the adapters alone, in fp32, as peft loads them; otherwise they are merged into the model.
    """
    if adapter and (dtype != "float32" or max_shard_size != "5GB"):
        raise ConfigError("--dtype and --max-shard-size have no effect with --adapter: leave them out")
    max_shard_bytes = parse_size(max_shard_size)
    check_unused(to.expanduser())
    console = Console()
    source = _ended(run, dtype, adapter) if checkpoint is None else _saved(run, checkpoint, dtype, adapter)
    with console.status("reading the model") as status, source as (folder, card):
        from diloco.models.export import export_adapter, export_model

        try:
            if adapter:
                export_adapter(_adapter(run, folder), folder, to, card=card)
                console.print(Text(f"exported to {to}"), soft_wrap=True)
                return
            tell = lambda done, total: status.update(f"writing the weights: {done} of {total} files")  # noqa: E731
            export_model(folder, to, dtype=dtype, max_shard_bytes=max_shard_bytes, card=card, progress=tell)
        except OSError as error:
            raise DiLoCoError(f"the model cannot be written to {to} ({error}): make room or choose another") from error
    console.print(Text(f"exported to {to}"), soft_wrap=True)


def _adapter(run: Path, model: Path) -> Path:
    """Return the folder of the adapters, which is beside that of the model."""
    folder = model.parent / ADAPTER_FOLDER
    if not folder.is_dir():
        raise ConfigError(f"--adapter: {run} was trained without LoRA, and has no adapters; leave it out")
    return folder


@contextmanager
def _ended(run: Path, dtype: str, adapter: bool) -> Iterator[tuple[Path, str]]:
    """Give the model folder and the card of a run that has ended."""
    folder = run_model(run)
    yield folder, model_card(read_summary(run), read_run_file(run / RUN_FILE), dtype=dtype, adapter=adapter)


@contextmanager
def _saved(run: Path, checkpoint: str, dtype: str, adapter: bool) -> Iterator[tuple[Path, str]]:
    """Give the model folder and the card of a checkpoint; the folder is there for the moment."""
    if checkpoint != "latest" and not checkpoint.isdecimal():
        raise ConfigError(f"--checkpoint {checkpoint}: give `latest`, or the inner step of a checkpoint")
    check_run_folder(run)
    from diloco.training.checkpoints.model import checkpoint_model, find_checkpoint
    from diloco.training.records.outputs import write_model

    chosen = find_checkpoint(run, None if checkpoint == "latest" else int(checkpoint))
    config = parse_config([token for token in merge([f"--resume={run}"])[0] if not token.startswith("--resume")])
    model, corpus = checkpoint_model(config, chosen)
    summary = summarize(config, history_until(run, chosen.step))
    summary |= {"inner_steps": chosen.step}
    card = model_card(summary, read_run_file(run / RUN_FILE), dtype=dtype, checkpoint_of=config.steps, adapter=adapter)
    with TemporaryDirectory(dir=run, prefix=".export-") as temporary:
        write_model(model, corpus, Path(temporary))
        yield Path(temporary) / MODEL_FOLDER, card


def parse_size(text: str) -> int:
    """Read `5GB` or `300 MiB` as a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if size < 1:
        raise ConfigError(f"{text!r} is not a size: give a number and a unit, such as 5GB or 300MB")
    return int(size)
