"""The checkpoint of an arm in progress: one file, from which the same command goes on.

    checkpoints/KEY.safetensors    tensors of replicas and workers; as metadata their numbers, and the run's identity

It has everything that a step changes, rounds in flight included: on a CPU the arm goes on bit for bit. A file of
another arm, way to compute, torch or code is reported and not used: no result is of two versions of the code.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.atomic_files import replace_file
from diloco.lab.arm import Arm
from diloco.lab.code import code_version
from diloco.lab.run_options import SAVE_SECONDS
from diloco.safetensors_files import file_chunks

logger = logging.getLogger(__name__)

_SHARE_OF_TIME = 0.05
"""The most of a run's time that saving takes: a large state is saved more rarely."""


class Interrupted(Exception):
    """The arm was asked to stop, and is saved if it had begun."""


@final
@dataclass(frozen=True)
class ArmState:
    """Everything that a step changes."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    """What JSON can hold."""

    def with_prefix(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with `prefix`, by the rest of their names."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def run_identity(arm: Arm, seed: int, corpus: str, how: str, device: torch.device) -> dict[str, str]:
    """Return the metadata that a checkpoint must have to be one of this run."""
    versions = {"torch": torch.__version__, "code": code_version()}
    return {"arm": arm.key(), "seed": str(seed), "text": corpus, "way": how, "device": device.type} | versions


@final
class ArmCheckpoint:
    """The file in which an arm in progress is saved, and when: every `seconds`, and when `stop` says so."""

    def __init__(self, path: Path, seconds: float = SAVE_SECONDS, stop: Callable[[], bool] = lambda: False) -> None:
        self.path = path
        self._seconds = seconds
        self.stop = stop
        self.resumed_at = 0
        """The step from which the arm went on; 0: from the beginning."""
        self._next = time.monotonic() + seconds

    def due(self) -> bool:
        return self.stop() or time.monotonic() >= self._next

    def write(self, state: ArmState, identity: Mapping[str, str]) -> None:
        """Replace the file. If it cannot be written, that is logged, and the arm goes on."""
        started = time.monotonic()
        metadata = {**identity, "numbers": json.dumps(state.numbers)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self.path) as file:
                for chunk in file_chunks(state.tensors, metadata):
                    file.write(chunk)
        except OSError as error:
            logger.warning("the arm in progress cannot be saved: %s", error)
        ended = time.monotonic()
        self._next = ended + max(self._seconds, (ended - started) / _SHARE_OF_TIME)

    def read(self, identity: Mapping[str, str]) -> ArmState | None:
        """Read the state of this very run into main memory; None if there is none."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata() or {}
                if differing := [name for name in identity if metadata.get(name) != identity[name]]:
                    logger.warning("%s is of another %s: the arm begins anew", self.path, " and ".join(differing))
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return ArmState(tensors, json.loads(metadata["numbers"]))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            logger.warning("%s cannot be read (%s): the arm begins anew", self.path, error)
            return None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
