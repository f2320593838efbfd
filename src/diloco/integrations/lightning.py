"""DiLoCo under the Trainer of Lightning: the callback that goes with the optimizer.

    configure_optimizers returns diloco.DiLoCo(self, AdamW(...), engine)
    Trainer(devices=1, callbacks=[LightningCallback()])

The Trainer keeps its schedule, clipping, accumulation, precision and checkpoints; each worker needs a
`default_root_dir` of its own. Workers may have different numbers of steps. Works with `lightning` and
`pytorch_lightning`. Refused: a Trainer of several processes.
"""

import sys
from importlib import import_module
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo

_PACKAGE: Any = import_module("lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning")


class LightningCallback(_PACKAGE.Callback):  # type: ignore[misc]
    """Runs the last rounds at the end of training, and stops this worker when another worker stops early."""

    def __init__(self, *, end_together: bool = False) -> None:
        """`end_together`: this worker stops when another one has taken all its steps; else it takes all of its own."""
        self.end_together = end_together
        self._optimizer: DiLoCo | None = None
        self._steps_before = 0  # the Trainer's steps before DiLoCo counted any

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del pl_module, stage
        if trainer.world_size > 1:
            raise ConfigError(
                f"the Trainer sees {trainer.world_size} processes, and would average gradients over them: call "
                "engine = diloco.connect(island=True) first, and give the Trainer devices=1"
            )
        # Lightning reads the rank at import, which may be before connect(island=True). Every worker saves as rank 0.
        rank_zero_only.rank = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        optimizer = _diloco_optimizer(trainer.optimizers)
        self._optimizer = optimizer
        # Lightning then unscales and clips itself, and skips the step if GradScaler says so: counted below.
        optimizer._step_supports_amp_scaling = False
        self._steps_before = trainer.global_step - optimizer.loop.inner_steps

    def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
        del more
        assert self._optimizer is not None
        if self._optimizer.loop.inner_steps < trainer.global_step - self._steps_before:
            self._optimizer.skip_step()
        if self._optimizer.stopping or self._ends_with_the_others():
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        assert self._optimizer is not None
        self._optimizer.finish(early=trainer.should_stop and not self._ends_with_the_others())

    def _ends_with_the_others(self) -> bool:
        return self.end_together and self._optimizer is not None and self._optimizer.others_done


def _diloco_optimizer(optimizers: list[Any]) -> DiLoCo:
    if len(optimizers) != 1 or not isinstance(optimizers[0], DiLoCo):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise ConfigError(f"configure_optimizers must return one diloco.DiLoCo, and returned {names}")
    return optimizers[0]
