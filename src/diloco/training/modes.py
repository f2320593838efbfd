"""The two ways to train together, behind one interface for the loop: DiLoCo, and data parallelism as its baseline.

In data-parallel training the workers average their gradients at every step, through the same codec, engine and byte
counting as an outer gradient, and then all take the same inner step. The classical baseline sends fp32.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import FaultsConfig, SyncConfig
from diloco.core.digest import digest
from diloco.core.fragments import PartLayout
from diloco.core.options import common_values
from diloco.core.outer_optimizers import outer_optimizer
from diloco.engines.base import Connection, Engine
from diloco.engines.rounds import Contribution, GlobalState, Report, RoundKey, RoundResult
from diloco.errors import EngineError, RoundFailed
from diloco.models.base import LanguageModel
from diloco.optimizer import DiLoCo
from diloco.outer.gradient_mean import GradientMean
from diloco.outer.loop import OuterLoop
from diloco.outer.rounds import RoundCounters
from diloco.outer.tensors import Numbers, TensorPieces, model_tensors
from diloco.training.compute import Precision
from diloco.training.config.run import RunConfig, learning_rates, num_rounds

_LEAST_WEIGHT = 1e-6
"""The weight of a step's gradient without any token that is learnt; weights of 0 only would be no mean at all."""


def _gradient_weight(learnt: int | None, by_tokens: bool) -> float | None:
    """Return the weight of a step's gradients in a mean: the tokens that were learnt. None without a loss mask, or not
    `by_tokens`, if shards have weights of their own."""
    return max(float(learnt), _LEAST_WEIGHT) if learnt is not None and by_tokens else None


class Mode(ABC):
    """The interface of a way to train together."""

    ended_at: int | None = None
    """This worker's last position, noted before the confirmation, which takes all workers to that of the foremost."""

    @property
    @abstractmethod
    def averager(self) -> "OuterLoop | DataParallel":
        """Return what takes part in the rounds: it has the counters and the report."""

    @abstractmethod
    def zero_grad(self) -> None: ...

    @abstractmethod
    def before_clipping(self, learnt: int | None = None) -> None:
        """Prepare the gradients, before each worker clips its own. `learnt`: the tokens of this step that the worker
        learns, if a loss mask leaves others out."""

    @abstractmethod
    def step(self) -> None: ...

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
    def skipped_steps(self) -> int:
        """The number of inner steps without a change, since fp16 gradients had overflowed."""
        return 0

    @abstractmethod
    def request_stop(self) -> None:
        """Note that this worker wants to end before the last step."""

    @property
    @abstractmethod
    def must_end(self) -> bool:
        """Leave the loop and finish now."""

    @abstractmethod
    def finish(self, before_confirming: Callable[[], None]) -> None:
        """Take the last rounds; `before_confirming` is called before the one that confirms the end."""

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


# DiLoCo


class DiLoCoMode(Mode):
    """DiLoCo, as a run's configuration has it."""

    def __init__(
        self,
        model: LanguageModel,
        inner: torch.optim.Optimizer,
        engine: Connection,
        config: RunConfig,
        precision: Precision,
        identity: str,
        weight: float,
        *,
        restoring: bool,
    ) -> None:
        """`weight`: of this worker's contributions to a mean. `restoring`: a checkpoint is loaded next."""
        self._precision = precision
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
        self.averager.rates = learning_rates(config.inner, config.steps)
        if not engine.elastic and config.sync.dynamic_steps:
            self.averager.end_at(config.steps)
        self._stop_requested = False
        self._by_tokens = config.data.partition == "iid"

    @property
    def averager(self) -> OuterLoop:
        return self.optimizer.loop

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def before_clipping(self, learnt: int | None = None) -> None:
        """Average gradients in a warm start; later each worker keeps its own."""
        self.optimizer.average_gradients(_gradient_weight(learnt, self._by_tokens))
        self._precision.unscale(self.optimizer)

    def step(self) -> None:
        self._precision.step(self.optimizer)

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


def _faults(config: RunConfig) -> FaultsConfig | None:
    if not config.faults.drop:
        return None
    return replace(config.faults, seed=config.seed if config.faults.seed is None else config.faults.seed)


# The baseline


class DataParallel(Mode):
    """Data-parallel training: `average_gradients()` after backward, then clipping, then `step()`."""

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        engine: Engine,
        *,
        sync: SyncConfig,
        weight: float = 1.0,
        identity: str = "",
        by_tokens: bool = True,
        restoring: bool = False,
    ) -> None:
        """`by_tokens`: with a loss mask a step counts by the tokens that it learns instead of by `weight`.

        `restoring`: a saved state is loaded right after, so no parameters are sent now.
        """
        self.inner = inner
        self.engine = engine
        self.sync = sync
        self.weight = weight
        self._by_tokens = by_tokens
        tensors = model_tensors(model, inner, send_frozen=False)  # a LoRA's base: its digest is in `identity`
        self.parameters = tensors.averaged
        self._gradients = GradientMean(self.parameters, codec(sync.codec), sync.max_norm_ratio)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.parameters.items()]
        self._layout = hashlib.sha256(
            repr(("data-parallel", shapes, common_values(sync), identity)).encode()
        ).hexdigest()[:16]
        whole = self.parameters | tensors.averaged_buffers | tensors.equal_at_start
        self._start = {} if restoring else whole
        self.report = Report()
        self.inner_steps = 0
        self.sequence = 0
        self.rounds = 0
        self.counters = RoundCounters()
        self.stopping = False
        engine.serve_state(self._state)
        self._join(engine.fetch_state())

    @property
    def averager(self) -> "DataParallel":
        return self

    def zero_grad(self) -> None:
        self._gradients.zero_grad()

    def before_clipping(self, learnt: int | None = None) -> None:
        self.weight = _gradient_weight(learnt, self._by_tokens) or self.weight
        self.average_gradients()

    def average_gradients(self) -> None:
        """Make every worker's gradient the mean; without a mean it raises, since no worker may step alone."""
        started = time.monotonic()
        try:
            result = self._round(self._gradients.contribution(self.weight, self._layout, self._report()))
        except RoundFailed as failure:
            raise EngineError(f"data-parallel step {self.inner_steps + 1} has no mean gradient: {failure}") from failure
        self._gradients.take(result)
        self.rounds += 1
        self.counters.sync_seconds += time.monotonic() - started
        self.stopping = self.stopping or result.stopping

    def _round(self, contribution: Contribution) -> RoundResult:
        key = RoundKey(self.sequence, 0)
        self.sequence += 1
        result = self.engine.start_round(key, contribution, self.sync.timeout_seconds).wait()
        self.counters.bytes_sent += result.bytes_sent
        self.counters.contributions_refused += len(result.refused)
        return result

    def _report(self) -> Report:
        return replace(
            self.report,
            inner_steps=self.inner_steps,
            bytes_sent=self.counters.bytes_sent,
            sync_seconds=self.counters.sync_seconds,
        )

    def step(self) -> None:
        self.inner.step()
        self.inner_steps += 1

    def leave_gradients_out(self) -> bool:
        """Take part all the same: gradients that are not finite are refused by all workers."""
        self.average_gradients()
        return True

    def post_and_merge(self) -> None:
        raise AssertionError("in this mode a step and its average are one")

    @property
    def steps_taken(self) -> int:
        return self.inner_steps

    # The end

    def request_stop(self) -> None:
        self.report = replace(self.report, stopping=True)

    @property
    def must_end(self) -> bool:
        """Return whether all workers know of a stop: the next step's averaging tells them, and all end after it."""
        return self.stopping

    def finish(self, before_confirming: Callable[[], None] | None = None) -> None:
        """Take a last exchange without payload: every worker learns the others' final digest and report."""
        if before_confirming is not None:
            before_confirming()
        vector = EncodedVector(codec(self.sync.codec), PartLayout(0))
        self._round(Contribution(vector, 0.0, 0.0, self.anchor_digest(), self._layout, report=self._report()))

    def outer_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_from_anchor(self) -> None:
        """Count from 0 again: the parameters are the same on all workers, and the counts were another one's."""
        self.counters.bytes_sent = 0
        self.counters.sync_seconds = 0.0

    # Saving

    def settle(self) -> None:
        """Do nothing: no round is in flight between two steps."""

    def unsavable(self) -> str | None:
        """Return None: a worker that stops does so after a step like any other, together with all."""
        return None

    def saved(self) -> tuple[dict[str, TensorPieces], Numbers]:
        """Return what to save: everything but the model and the inner optimizer."""
        position = {"inner_steps": self.inner_steps, "sequence": self.sequence, "rounds": self.rounds}
        return {}, position | asdict(self.counters) | {"report": asdict(self.report)}

    def memory_to_load(self, numbers: Numbers) -> tuple[dict[str, TensorPieces], Callable[[], None]]:
        """Return the memory to load a saved state into, and what to call then."""

        def loaded() -> None:
            self.inner_steps = numbers["inner_steps"]
            self.sequence = numbers["sequence"]
            self.rounds = numbers["rounds"]
            self.counters = RoundCounters.from_numbers(numbers)
            self.report = Report(**numbers["report"] | {"stopping": False})
            self.stopping = False

        return {}, loaded

    @torch.no_grad()
    def anchor_digest(self) -> str:
        """Return the digest of the parameters, which every worker must hold in the same bits."""
        parts = [digest(parameter.detach().float().reshape(-1)) for parameter in self.parameters.values()]
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]

    def _state(self) -> GlobalState:
        tensors = {name: tensor.detach() for name, tensor in self._start.items()}
        return GlobalState(tensors, {"merged": self.rounds, "inner_steps": 0, "sequence": 0}, self._layout)

    @torch.no_grad()
    def _join(self, state: GlobalState | None) -> None:
        if state is not None:
            for name, tensor in self._start.items():
                if tensor.data_ptr() != state.tensors[name].data_ptr():
                    tensor.copy_(state.tensors[name])
