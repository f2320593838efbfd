"""The warm start: the first inner steps of a run are data-parallel, as the paper's pre-training phase is.

In a swarm, where a step cannot wait for workers that come and go, the founder takes them alone: nothing is averaged,
and joiners get no state before the last of them (`ElasticLoop`), so that they begin where the warm start ends.
What follows is about a fixed set of workers.

At each of these steps the workers average their gradients and then take the same inner step, so that parameters and
inner optimizer state stay equal; the anchor follows the parameters. The outer loop begins when they are over: its first
round comes H inner steps later. From scratch this decides, since the outer gradients of workers that have barely begun
point apart. Workers on different devices may round differently; the first round then makes them equal again.

Gradients travel through the codec and the engine of the outer gradients, and their bytes are counted with those. A
codec that needs error feedback would leave too much out of a single gradient: int4 carries them then. A gradient is
refused only if it is not finite: single batches differ in norm by large factors, and clipping the mean bounds it.
"""

import logging

from torch import Tensor

from diloco.codecs.registry import codec
from diloco.engines.rounds import GRADIENTS, Contribution, RoundKey, RoundResult
from diloco.errors import ConfigError, EngineError, RoundFailed
from diloco.outer.gradient_mean import GradientMean
from diloco.outer.loop import OuterLoop

logger = logging.getLogger(__name__)


class WarmStart:
    """The first `sync.warm_start` steps of an outer loop. Each of them: `average`, the inner step, `end_step`."""

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop
        self.steps = loop.sync.warm_start
        self.averaged_steps = 0 if loop.engine.elastic else self.steps
        """The number of these steps that average gradients: all of them, or none in a swarm."""
        self._gradients: GradientMean | None = None
        self._averaged_at = -1  # the step whose gradients are the mean already
        self.stopping = False
        """A worker has asked for the end: all leave after this step."""

    @property
    def active(self) -> bool:
        """Whether the next inner step averages gradients."""
        return self._loop.inner_steps < self.averaged_steps

    def refuse(self, closure: object | None, found_inf: Tensor | None) -> None:
        """Refuse gradients that cannot be averaged: those that only the inner step computes, or with a scale each."""
        if closure is not None:
            raise ConfigError(
                f"step(closure) within sync.warm_start = {self.steps}: the gradients are averaged before the inner "
                "step, and a closure computes them inside it; compute them first, and call step()"
            )
        if found_inf is not None:
            raise ConfigError(
                f"a GradScaler within sync.warm_start = {self.steps}: each worker scales its gradients differently, "
                "and they cannot be averaged; use bf16 or fp32, or no warm start"
            )

    def average(self, *, skip: bool = False, weight: float | None = None) -> bool:
        """Put the mean in place of every worker's gradients; returns whether there is one. `skip`: leave this worker's
        own out of it. `weight`: of this worker's gradients, if not that of its contributions.

        A second call at the same step does nothing. Raises EngineError if the round fails, since no worker may step
        alone.
        """
        loop = self._loop
        step = self._loop.inner_steps
        if self._averaged_at == step or loop.engine.workers == 1:
            return not skip
        self._averaged_at = step
        with loop.count_seconds():
            return self._average(0.0 if skip else loop.weight if weight is None else weight)

    def _average(self, weight: float) -> bool:
        loop = self._loop
        step = self._loop.inner_steps
        if self._gradients is None:
            how = codec(loop.sync.gradient_codec)
            self._gradients = GradientMean(loop.replica.tensors.averaged, how, max_norm_ratio=None)
        self._measure_speed()
        layout = loop.replica.lanes[0].layout_digest
        contribution = self._gradients.contribution(weight, layout, loop.report_now())
        result = self._round(RoundKey(step - self.steps, GRADIENTS), contribution)
        self.stopping = self.stopping or result.stopping
        for method in loop.methods:
            method.heard(result.members)
        loop.counters.contributions_refused += len(result.refused)
        for worker, reason in result.refused.items():
            logger.warning("step %d: the gradients of worker %d were refused: %s", step + 1, worker, reason)
        if result.total_weight:
            self._gradients.take(result)
        return result.total_weight > 0

    def end_step(self) -> None:
        """Let the anchor follow the parameters, which are equal on all workers; the inner step was taken and counted.

        Buffers stay behind: their statistics are a worker's own until the first round.
        """
        if self._loop.inner_steps > self.steps:
            return
        self._loop.state.take_anchors()
        if self._loop.inner_steps == self.steps:
            self._gradients = None
            self.take_digests()

    def end(self) -> None:
        """Called when training ends, perhaps within the warm start."""
        if self._loop.inner_steps < self.steps:
            self.take_digests()
        self.stopping = False

    def take_digests(self) -> None:
        """Take the digests of the anchors, which follow the parameters without them."""
        for lane in self._loop.replica.lanes:
            lane.take_digests()

    def _measure_speed(self) -> None:
        """Measure the speed every H steps, and at the last step: it is then known when the rounds begin. The first
        step, which may wait for compilers and data, does not count."""
        loop = self._loop
        step = self._loop.inner_steps
        H = self._loop.sync.num_inner_steps
        if step == 1:
            for method in loop.methods:
                method.begin_anew()
        elif step and (step % H == 0 or step == self.steps - 1):
            for method in loop.methods:
                loop.report = method.report(loop.report)

    def _round(self, key: RoundKey, contribution: Contribution) -> RoundResult:
        loop = self._loop
        engine = loop.replica.lanes[0].engine
        try:
            result = engine.start_round(key, contribution, loop.sync.timeout_seconds).wait()
        except RoundFailed as failure:
            raise EngineError(
                f"step {loop.inner_steps + 1} of the warm start has no mean gradient: {failure}. All workers must take "
                f"all of its sync.warm_start = {self.steps} steps"
            ) from failure
        loop.counters.bytes_sent += result.bytes_sent
        return result
