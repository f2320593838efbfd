"""The two ways to train together, behind one face for the loop: DiLoCo, and data parallelism as its baseline."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from diloco.core.config import FaultsConfig
from diloco.core.outer_optimizers import outer_optimizer
from diloco.engines.base import Connection, Engine
from diloco.models.base import LanguageModel
from diloco.optimizer import DiLoCo
from diloco.outer.loop import OuterLoop
from diloco.training.compute import Precision
from diloco.training.config.run import RunConfig, learning_rates, num_rounds
from diloco.training.data_parallel import DataParallel

_LEAST_WEIGHT = 1e-6
"""The weight of a step's gradient without any token that is learnt; weights of 0 only would be no mean at all."""


def _gradient_weight(learnt: int | None, is_iid: bool) -> float | None:
    """Return the weight of a step's gradients in a mean: the tokens that were learnt. None without a loss mask, or if
    shards have weights of their own."""
    return max(float(learnt), _LEAST_WEIGHT) if learnt is not None and is_iid else None


class Mode(ABC):
    """The interface of a way to train together. `averager` carries the counters and the report."""

    averager: OuterLoop | DataParallel
    ended_at: int | None = None
    """This worker's last position, noted before the confirmation, which takes all workers to that of the foremost."""

    @abstractmethod
    def zero_grad(self) -> None: ...

    @abstractmethod
    def before_clipping(self, precision: Precision, learnt: int | None = None) -> None:
        """Whatever is done with gradients before each worker clips its own. `learnt`: the tokens of this step that the
        worker learns, if a loss mask leaves others out."""

    @abstractmethod
    def step(self, precision: Precision) -> None: ...

    @abstractmethod
    def leave_gradients_out(self) -> bool:
        """Take the place of `before_clipping` in a worker whose loss is not finite.

        Returns whether it has the others' gradients, and takes the step with them. Without an average of gradients
        there is no step.
        """

    @abstractmethod
    def post_and_merge(self) -> None:
        """Take the rounds that belong to the last inner step, if it was saved without them."""

    @property
    @abstractmethod
    def steps_taken(self) -> int:
        """Return the inner steps of this worker itself: its position in the schedule may have jumped."""

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """The number of inner steps without a change, since fp16 gradients had overflowed."""

    @abstractmethod
    def request_stop(self) -> None:
        """This worker wants to end before the last step."""

    @property
    @abstractmethod
    def must_end(self) -> bool:
        """Leave the loop and finish now."""

    @abstractmethod
    def finish(self, before_confirming: Callable[[], None]) -> None: ...

    @abstractmethod
    def outer_parameters(self) -> AbstractContextManager[None]:
        """Return the parameters to evaluate."""

    @abstractmethod
    def anchor_digest(self) -> str: ...

    @abstractmethod
    def start_from_anchor(self) -> None:
        """Keep nothing of the worker's own work in the parameters: another worker's state was loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved besides the state of `averager`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def _faults(config: RunConfig) -> FaultsConfig | None:
    if not config.faults.drop:
        return None
    return replace(config.faults, seed=config.seed if config.faults.seed is None else config.faults.seed)


class DiLoCoMode(Mode):
    def __init__(
        self,
        model: LanguageModel,
        inner: torch.optim.Optimizer,
        engine: Connection,
        config: RunConfig,
        identity: str,
        weight: float,
        *,
        restoring: bool,
    ) -> None:
        """`weight`: of this worker's contributions to a mean. `restoring`: a checkpoint is loaded next."""
        self.optimizer = DiLoCo(
            model,
            inner,
            engine,
            sync=config.sync,
            outer=outer_optimizer(config.outer, num_rounds(config)),
            weight=weight,
            identity=identity,
            restoring=restoring,
            learning_rates=None if config.sync.growth is None else learning_rates(config.inner, config.steps),
            faults=_faults(config),
            send_frozen=False,  # a LoRA's base: its digest is in `identity`
        )
        self.optimizer.unfinished.silence()  # Training finishes, or says why it failed
        inner.register_step_post_hook(lambda *_: inner.zero_grad())  # a round needs their memory
        self.averager: OuterLoop = self.optimizer.loop
        self.averager.rates = learning_rates(config.inner, config.steps)
        if not engine.elastic and config.sync.dynamic_steps:
            self.averager.end_at(config.steps)
        self._stop_requested = False
        self._is_iid = config.data.partition == "iid"

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def before_clipping(self, precision: Precision, learnt: int | None = None) -> None:
        """A worker's gradients are its own, but for a warm start's."""
        self.optimizer.average_gradients(_gradient_weight(learnt, self._is_iid))
        precision.unscale(self.optimizer)

    def step(self, precision: Precision) -> None:
        precision.step(self.optimizer)

    def leave_gradients_out(self) -> bool:
        warm_start = self.optimizer.warm_start
        return warm_start is not None and warm_start.active and warm_start.average(skip=True)

    def post_and_merge(self) -> None:
        self.optimizer.post()
        self.optimizer.merge()

    @property
    def steps_taken(self) -> int:
        return self.averager.state.steps_taken

    @property
    def skipped_steps(self) -> int:
        return self.optimizer.skipped_steps

    def request_stop(self) -> None:
        self._stop_requested = True
        warm_start = self.optimizer.warm_start
        if warm_start is not None and warm_start.active:
            self.averager.report = replace(self.averager.report, stopping=True)

    @property
    def must_end(self) -> bool:
        """Return whether to end: at once if it is this worker's wish, since the round in which it ends tells the
        others.

        Within the warm start only once all workers know: the next step's averaging tells them, and all end after it.
        """
        warm_start = self.optimizer.warm_start
        if warm_start is not None and (warm_start.active or warm_start.stopping):
            return warm_start.stopping
        return self._stop_requested or self.averager.stopping

    def finish(self, before_confirming: Callable[[], None]) -> None:
        self.optimizer.finish(early=self._stop_requested, before_confirming=before_confirming)

    def outer_parameters(self) -> AbstractContextManager[None]:
        return self.optimizer.outer_parameters()

    def anchor_digest(self) -> str:
        return self.optimizer.anchor_digest()

    def start_from_anchor(self) -> None:
        self.averager.start_from_anchor()
        self.optimizer.skipped_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.optimizer.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.skipped_steps = state["skipped_steps"]


class DataParallelMode(Mode):
    def __init__(
        self,
        model: LanguageModel,
        inner: torch.optim.Optimizer,
        engine: Engine,
        config: RunConfig,
        identity: str,
        weight: float,
        *,
        restoring: bool,
    ) -> None:
        self.averager: DataParallel = DataParallel(
            model, inner, engine, sync=config.sync, weight=weight, identity=identity, restoring=restoring
        )
        self._is_iid = config.data.partition == "iid"

    def zero_grad(self) -> None:
        self.averager.zero_grad()

    def before_clipping(self, precision: Precision, learnt: int | None = None) -> None:  # noqa: ARG002 - fp16 is refused
        self.averager.weight = _gradient_weight(learnt, self._is_iid) or self.averager.weight
        self.averager.average_gradients()

    def step(self, precision: Precision) -> None:  # noqa: ARG002
        self.averager.step()

    def leave_gradients_out(self) -> bool:
        """Its gradients are not finite either, and are refused by all workers."""
        self.averager.average_gradients()
        return True

    def post_and_merge(self) -> None:
        raise AssertionError("in this mode a step and its average are one")

    @property
    def steps_taken(self) -> int:
        return self.averager.inner_steps

    @property
    def skipped_steps(self) -> int:
        return 0

    def request_stop(self) -> None:
        self.averager.report = replace(self.averager.report, stopping=True)

    @property
    def must_end(self) -> bool:
        """Return whether all workers know of a stop: the next step's averaging tells them, and all end after it."""
        return self.averager.stopping

    def finish(self, before_confirming: Callable[[], None]) -> None:
        self.averager.finish(before_confirming=before_confirming)

    def outer_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def anchor_digest(self) -> str:
        return self.averager.anchor_digest()

    def start_from_anchor(self) -> None:
        """The parameters are the same on all workers; the counts are another worker's."""
        self.averager.bytes_sent = 0
        self.averager.sync_seconds = 0.0
