"""Data-parallel training over the same engines: the baseline that DiLoCo is compared with.

At every step the workers average their gradients through the same codec, engine and byte counting as an outer gradient,
and then all take the same inner step. The classical baseline sends fp32.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch import nn

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.digest import digest
from diloco.core.fragments import PartLayout
from diloco.core.options import common_values
from diloco.engines.base import Engine
from diloco.engines.rounds import Contribution, GlobalState, Report, RoundKey, RoundResult
from diloco.errors import EngineError, RoundFailed
from diloco.outer.gradient_mean import GradientMean
from diloco.outer.tensors import Numbers, TensorPieces, model_tensors

_COUNTERS = (
    "inner_steps", "sequence", "rounds", "rounds_failed", "contributions_refused", "bytes_sent", "sync_seconds"
)  # fmt: skip


class DataParallel:
    """Call `average_gradients()` after backward, then clip if you like, then `step()`."""

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        engine: Engine,
        *,
        sync: SyncConfig,
        weight: float = 1.0,
        identity: str = "",
        restoring: bool = False,
    ) -> None:
        """`restoring`: a saved state is loaded right after, so no parameters are sent now."""
        self.inner = inner
        self.engine = engine
        self.sync = sync
        self.weight = weight
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
        self.rounds_failed = 0
        self.contributions_refused = 0
        self.bytes_sent = 0
        self.sync_seconds = 0.0
        self.stopping = False
        engine.serve_state(self._state)
        self._join(engine.fetch_state())

    def zero_grad(self) -> None:
        self._gradients.zero_grad()

    def average_gradients(self) -> None:
        """Every worker's gradient becomes the mean; without a mean it raises, since no worker may step alone."""
        started = time.monotonic()
        try:
            result = self._round(self._gradients.contribution(self.weight, self._layout, self._report()))
        except RoundFailed as failure:
            raise EngineError(f"data-parallel step {self.inner_steps + 1} has no mean gradient: {failure}") from failure
        self._gradients.take(result)
        self.rounds += 1
        self.sync_seconds += time.monotonic() - started
        self.stopping = self.stopping or result.stopping

    def _round(self, contribution: Contribution) -> RoundResult:
        key = RoundKey(self.sequence, 0)
        self.sequence += 1
        result = self.engine.start_round(key, contribution, self.sync.timeout_seconds).wait()
        self.bytes_sent += result.bytes_sent
        self.contributions_refused += len(result.refused)
        return result

    def _report(self) -> Report:
        return replace(
            self.report,
            inner_steps=self.inner_steps,
            bytes_sent=self.bytes_sent,
            sync_seconds=self.sync_seconds,
        )

    def step(self) -> None:
        self.inner.step()
        self.inner_steps += 1

    def finish(self, *, before_confirming: Callable[[], None] | None = None) -> None:
        """A last exchange without payload: every worker learns the others' final digest and report."""
        if before_confirming is not None:
            before_confirming()
        vector = EncodedVector(codec(self.sync.codec), PartLayout(0))
        self._round(Contribution(vector, 0.0, 0.0, self.anchor_digest(), self._layout, report=self._report()))

    # Saving

    def settle(self) -> None:
        """Do nothing: no round is in flight between two steps."""

    def unsavable(self) -> str | None:
        """A worker that stops does so after a step like any other, together with all."""
        return None

    def saved(self) -> tuple[dict[str, TensorPieces], Numbers]:
        """Everything but the model and the inner optimizer."""
        return {}, {name: getattr(self, name) for name in _COUNTERS} | {"report": asdict(self.report)}

    def memory_to_load(self, numbers: Numbers) -> tuple[dict[str, TensorPieces], Callable[[], None]]:
        """Return the memory to load a saved state into, and what to call then."""

        def loaded() -> None:
            for name in _COUNTERS:
                setattr(self, name, numbers[name])
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
