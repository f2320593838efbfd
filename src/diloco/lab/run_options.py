"""The options of `diloco lab run` and `diloco lab tune`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

STDLIB = "stdlib"
SAVE_SECONDS = 60.0
ScaleName = Literal["smoke", "cpu", "gpu", "1m", "4m", "14m"]


@final
@dataclass(frozen=True)
class RunOptions:
    """Which arms to run, on what, and where results go.

    Parameters
    ----------
    scale
        smoke: does it run; cpu: small runs; gpu: three seconds an arm on a large GPU; 1m, 4m, 14m: by model size.
    seeds
        Seeds 0 to N − 1 (default: 3, which a verdict needs). To tune: 1000 and the N − 1 after it (1).
    out
        The folder of results (default: runs/lab-SCALE).
    device
        cpu, cuda, or auto: a GPU if there is one.
    text
        Any data.source, or the folder of a prepared corpus.
    domains
        The same for workers that read different texts; its files or labels are the shards.
    seconds
        Begin no arm after this many.
    processes
        Arms at a time.
    how
        How replicas are computed: sequential, stacked, "stacked N", or auto: by the size of the model.
    save_seconds
        Save an arm in progress this often, and on Ctrl-C; inf: on Ctrl-C only.
    any_code
        Arms that other versions of the code have finished count as finished.
    """

    scale: ScaleName = "smoke"
    seeds: int | None = None
    out: Path | None = None
    device: str = "auto"
    text: str = STDLIB
    domains: str = STDLIB
    seconds: float = math.inf
    processes: int = 1
    how: str = "auto"
    save_seconds: float = SAVE_SECONDS
    any_code: bool = False

    @property
    def folder(self) -> Path:
        return self.out or Path(f"runs/lab-{self.scale}")
