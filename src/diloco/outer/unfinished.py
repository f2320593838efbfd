"""Warnings at the end of a run, where no error says that it went wrong.

A loop without `finish()` leaves its workers with different parameters; a run of a single round has hardly averaged.
"""

import logging
import sys
import weakref

from diloco.outer.loop import OuterLoop

logger = logging.getLogger(__name__)


class UnfinishedSteps:
    """Warns when an optimizer is dropped, or the program ends, with steps in it that no round has averaged.

    Silent after an exception, which says enough. Refers to nothing of the optimizer, which would live for ever else.
    """

    def __init__(self, optimizer: object, worker: int) -> None:
        self._worker = worker
        self.steps = 0
        """Taken since the last round (of the fragment that was averaged longest ago)."""
        self._finalizer = weakref.finalize(optimizer, self._warn)

    def silence(self) -> None:
        """The caller sees to the end itself, or has no other worker."""
        self._finalizer.detach()

    def _warn(self) -> None:
        if not self.steps or sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None:
            return
        logger.warning(
            "worker %d ended without optimizer.finish(), %d steps after its last round: these steps are in no mean, "
            "and its parameters are not the other workers'. Call optimizer.finish() after the loop on every worker, or "
            "give the Trainer its DiLoCoCallback",
            self._worker,
            self.steps,
        )


def warn_of_few_rounds(steps: int, loop: OuterLoop) -> None:
    """After one round the outer optimizer has hardly moved: training without DiLoCo is better."""
    if max(loop.state.merged_rounds) == 1:
        logger.warning(
            "the run ended after %d steps and a single round, since H = %d: the workers have averaged once only, "
            "which is worse than training on one of them. Choose H for ten rounds or more (H = %d), and for a "
            "handful of rounds plain averaging: outer=diloco.SGD(lr=1.0)",
            steps,
            loop.sync.num_inner_steps,
            max(1, steps // 10),
        )
