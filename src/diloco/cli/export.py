"""`diloco export RUN --to DIR`: a run's model as a folder to give away, with a model card."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.errors import DiLoCoError
from diloco.models.folders import check_unused, size_bytes
from diloco.training.config.run_file import read_run_file
from diloco.training.records.model_card import model_card
from diloco.training.records.run_folder import RUN_FILE, run_model
from diloco.training.records.summary import read_summary


def export(
    run: Path,
    /,
    *,
    to: Annotated[Path, Parameter(name="--to")],
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Parameter(name="--dtype")] = "float32",
    max_shard_size: Annotated[str, Parameter(name="--max-shard-size")] = "5GB",
) -> None:
    """Write a run's model as a folder that transformers loads.

    Parameters
    ----------
    run
        A run folder.
    to
        The folder to write; it must not exist, or be empty.
    dtype
        The type of the weights: float32, bfloat16 or float16.
    max_shard_size
        Weights above this size are cut into several files.
    """
    folder, most = run_model(run), size_bytes(max_shard_size)
    check_unused(to.expanduser())
    card = model_card(read_summary(run), read_run_file(run / RUN_FILE), dtype=dtype)
    from diloco.models.export import export_model

    console = Console()
    with console.status("writing the weights") as status:
        try:
            tell = lambda done, total: status.update(f"writing the weights: {done} of {total} files")  # noqa: E731
            export_model(folder, to, dtype=dtype, max_shard_bytes=most, card=card, progress=tell)
        except OSError as error:
            raise DiLoCoError(f"the model cannot be written to {to} ({error}): make room or choose another") from error
    console.print(Text(f"exported to {to}"), soft_wrap=True)
