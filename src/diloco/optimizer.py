"""DiLoCo as a torch.optim.Optimizer: the inner optimizer at every step, and a round when the schedule says so.

`step()` is three things in order, and a loop that drives several workers in one thread may call them itself:

    inner_step()   lines 5-8 of Algorithm 1: the inner optimizer moves θ_i
    post()         Δ_i = anchor − θ_i of the fragments that are due, encoded and given to the engine
    merge()        the mean of the fragments whose time has come, through the outer optimizer, back into θ_i

The inner optimizer stays the user's: learning-rate schedulers, hooks, parameter groups and GradScaler work as before.
"""

import logging
import math
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from diloco.core.config import NO_FAULTS, FaultsConfig, SyncConfig
from diloco.core.outer_optimizers import SGD, OuterOptimizer
from diloco.core.rates import LearningRateCurve
from diloco.engines.base import Connection
from diloco.errors import ConfigError
from diloco.methods.asynchronous import AsynchronousLoop, asynchronous_parts
from diloco.methods.growing_rounds import GrowingRounds
from diloco.methods.registry import chosen_methods
from diloco.methods.warm_start import WarmStart
from diloco.outer.arguments import (
    Arguments,
    check_model_inner_engine,
    check_replicas,
    chosen_outer,
    refuse_arguments,
    sync_config,
)
from diloco.outer.elastic import ElasticLoop
from diloco.outer.fixed import FixedLoop
from diloco.outer.loop import OuterLoop
from diloco.outer.method import Options
from diloco.outer.rounds import RoundEvent, mean_cosine
from diloco.outer.tensors import as_tensors, copy_into, model_tensors

logger = logging.getLogger(__name__)


def _wrapped_for_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step for hooks and the profiler, as torch does with every optimizer, but only where there are any: the
    wrapper takes longer than all else in a step without a round."""
    wrapped = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def chosen(self: "DiLoCo", *arguments: Any, **named: Any) -> Any:
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        needed = own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or _profiler_enabled()
        return (wrapped if needed else step)(self, *arguments, **named)

    setattr(chosen, "hooked", True)  # noqa: B010  torch then adds no wrapper of its own
    return chosen


class DiLoCo(torch.optim.Optimizer):
    """Wraps an inner optimizer; every H of its steps, one outer step together with the other workers."""

    loop: OuterLoop
    warm_start: WarmStart | None
    """The data-parallel steps at the start, if there are any."""
    _on_round: Callable[[RoundEvent], None] | None = None
    _step_supports_amp_scaling = True  # GradScaler then calls step() even when it skips: the schedule stays in step

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        engine: Connection,
        *,
        H: int | None = None,
        sync: SyncConfig | None = None,
        outer: OuterOptimizer | str | None = None,
        weight: float = 1.0,
        identity: str = "",
        restoring: bool = False,
        learning_rates: LearningRateCurve | None = None,
        faults: FaultsConfig | None = None,
        send_frozen: bool = True,
    ) -> None:
        """Collective: every worker builds it at the same point; all then have worker 0's parameters.

        Load weights and move the model to its device before: what changes the parameters later counts as training.
        `H` is the number of inner steps between two rounds (500); `sync` has all options of the rounds, H included.
        `outer` is an outer optimizer, or its name: "nesterov" (0.7 / 0.9, the default), "sgd", "sgdm", "adam".
        `weight` is this worker's share in the mean for each inner step: 1, its tokens per step, or its shard's size.
        `identity` names what else must be the same on all workers (the data, say): they refuse each other if it is not.
        `restoring`: a saved state is loaded right after, on every worker, so no parameters are sent now.
        `learning_rates`: those of `inner` over the whole run, which `sync.growth` needs to be known in advance.
        `faults`: on purpose, for experiments.
        `send_frozen`: False if all workers have the same frozen parameters already, and `identity` says which.
        """
        check_model_inner_engine(model, inner, engine)
        check_replicas(model, engine)
        self._first_check: Callable[[], None] | None = partial(check_replicas, model, engine)
        sync = sync_config(sync, H)
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"weight = {weight} must be a finite number above 0")
        self.inner = inner
        self.skipped_steps = 0
        super().__init__(inner.param_groups, inner.defaults)
        faults = faults or NO_FAULTS
        outer = chosen_outer(outer)
        refuse_arguments(Arguments(sync, engine, outer, learning_rates is not None, restoring, faults))
        tensors = model_tensors(model, inner, send_frozen=send_frozen)
        kind: type[OuterLoop] = ElasticLoop if engine.elastic else FixedLoop
        anchor_optimizer = outer
        if sync.asynchronous:
            kind = AsynchronousLoop
            engine, outer = asynchronous_parts(engine, outer, sync)
            # The others take over what worker 0 answers, and need no momentum of their own.
            anchor_optimizer = outer if engine.worker == 0 else SGD(lr=1.0)
        growth = GrowingRounds(sync.growth, learning_rates) if sync.growth and learning_rates else None
        self.loop = kind(
            tensors,
            engine,
            sync,
            anchor_optimizer,
            inner=inner,
            weight=weight,
            common=(outer, identity, faults),
            growth=growth,
            methods=chosen_methods(Options(sync, faults, engine, inner, tensors.averaged)),
        )
        self.loop.join(restoring=restoring)
        self.warm_start = WarmStart(self.loop) if sync.warm_start else None
        self.unfinished = UnfinishedSteps(self, engine.worker)
        if engine.workers == 1 and not engine.elastic:
            self.unfinished.silence()

    # What a training loop may read at any time

    @property
    def position(self) -> int:
        """Inner steps in the schedule; where workers come and go, it may jump ahead of those that were taken."""
        return self.loop.inner_steps

    @property
    def rounds(self) -> int:
        """Rounds whose mean is in the anchor, of all fragments of parameters; those of buffers are part of them."""
        return self.loop.outer_steps

    @property
    def failures(self) -> int:
        """Rounds that gave this worker no mean."""
        return self.loop.counters.rounds_failed

    @property
    def bytes_sent(self) -> int:
        """The bytes that this worker has sent in all rounds."""
        return self.loop.counters.bytes_sent

    @property
    def similarity(self) -> float | None:
        """Mean cosine between the outer gradients in the latest mean of two or more workers; None before it."""
        return mean_cosine(*self.loop.compared)

    @property
    def stopping(self) -> bool:
        """Whether a worker called `finish(early=True)`: leave the loop and call `finish()`."""
        return self.loop.stopping or (self.warm_start is not None and self.warm_start.stopping)

    @property
    def others_done(self) -> bool:
        """Whether another worker has taken all its steps, and waits in `finish()` for the others' rounds.

        Leave the loop and call `finish()` to end with it, or go on: both are right.
        """
        return self.loop.others_done

    @property
    def on_round(self) -> Callable[[RoundEvent], None] | None:
        """The function that is called after every round, with or without a mean, in this thread.

        A round of the model's buffers, which travel with the last fragment, is part of that fragment's round.
        """
        return self._on_round

    @on_round.setter
    def on_round(self, function: Callable[[RoundEvent], None] | None) -> None:
        self._on_round = function
        is_auxiliary = self.loop.is_auxiliary
        if function is None:
            self.loop.on_round = None
        else:
            self.loop.on_round = lambda event: None if is_auxiliary(event.key) else function(event)

    def tell(self, *, loss: float | None = None, tokens: int | None = None) -> None:
        """Tell the others, and `diloco status`, of this worker besides its position; call it at any time.

        `loss`: of the latest step. `tokens`: that this worker has trained on in all.
        """
        if loss is not None:
            self.loop.report = replace(self.loop.report, loss=loss)
        if tokens is not None:
            if tokens < 0:
                raise ConfigError(f"tokens = {tokens} must be at least 0")
            self.loop.report = replace(self.loop.report, tokens=tokens)

    # The three parts of a step, and the end

    @_wrapped_for_hooks
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = self.inner_step(closure)
        self.loop.post()
        self.merge()
        return loss

    def inner_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of the inner optimizer. A step that GradScaler found infinite is skipped and counted."""
        self.loop.refuse_while_evaluating()
        if self._first_check is not None:  # a framework may have wrapped the model since
            self._first_check()
            self._first_check = None
        loss: float | None = None
        found_inf: Tensor | None = getattr(self, "found_inf", None)  # what GradScaler left for this step, if anything
        warm_start = self._averaging_start
        if warm_start is not None:
            warm_start.refuse(closure, found_inf)
            self._shared_step(warm_start.average())
            return None
        if found_inf is None or self._unscale(found_inf):
            loss = self.inner.step(closure) if closure is not None else self.inner.step()
        else:
            self.skipped_steps += 1
        self._count_step()
        return loss

    def average_gradients(self, weight: float | None = None) -> None:
        """Average all workers' gradients during the warm start, before the loop clips them.

        `step()` does it if the loop does not. After the warm start it does nothing: gradients are a worker's own.
        `weight`: of this worker's gradients in the mean (default: of its contributions).
        """
        warm_start = self._averaging_start
        if warm_start is not None:
            warm_start.average(weight=weight)

    def _shared_step(self, has_mean: bool) -> None:
        """Take a step of the warm start with the mean of all gradients: all workers take it alike, or none of them
        does."""
        if has_mean:
            self.inner.step()
        else:
            self.skipped_steps += 1
        self._count_step()

    def _count_step(self) -> None:
        self.loop.inner_steps += 1
        if self.warm_start is not None:
            self.warm_start.end_step()

    def skip_step(self) -> None:
        """Count a step that the loop leaves out, instead of `step()`, because gradients are not finite.

        The step is counted, and a round that is due takes place: the others are waiting for this worker. During the
        warm start this worker takes the step with the others' gradients.
        """
        warm_start = self._averaging_start
        if warm_start is not None:
            self._shared_step(warm_start.average(skip=True))
        else:
            self.skipped_steps += 1
            self._count_step()
        self.loop.post()
        self.merge()

    def _unscale(self, found_inf: Tensor) -> bool:
        """Divide the gradients by GradScaler's scale; False if one is not finite, and the step must be skipped."""
        if found_inf.item():
            return False
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:  # None: the loop has called unscale_ itself, to clip
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device))
        return True

    def post(self) -> None:
        """Give the engine the outer gradients that are due; returns at once."""
        self.loop.post()

    def merge(self) -> None:
        """Take back the rounds whose time has come; waits for them if the network is behind."""
        self.loop.merge()
        self.unfinished.steps = self.loop.state.steps_since_round

    def finish(self, *, early: bool = False, before_confirming: Callable[[], None] | None = None) -> None:
        """Average what is left, leave the outer parameters in the model, and confirm that all have the same.

        Every worker calls it after its last step, however many steps it took. A worker that is done before the others
        goes through their rounds with them, without work of its own, until all are done; where workers come and go it
        averages what it has left, and leaves. After `finish()` all may train on together: `step()` goes on from there.

        `early` says that this worker ends before the others expect it: they then end after the same round, but where
        workers come and go it leaves alone, with the anchor as it is.
        `before_confirming` runs with the final parameters in the model; all learn what it puts into `loop.report`.
        """
        if self.warm_start is not None:
            self.warm_start.end()
        self.unfinished.steps = 0
        self.loop.finish(early=early, before_confirming=before_confirming)
        if not early:
            warn_of_few_rounds(self.loop.inner_steps - self.loop.sync.warm_start, self.loop)

    def outer_parameters(self) -> AbstractContextManager[None]:
        """Put the anchor's parameters into the model within this context, to evaluate; afterwards it has its own
        again."""
        return self.loop.outer_parameters()

    def anchor_digest(self) -> str:
        """Return sixteen hexadecimal digits for all anchors together: equal on all workers after a round."""
        return self.loop.state.anchor_digest()

    @property
    def _averaging_start(self) -> WarmStart | None:
        """The warm start, if the next inner step is one of those in which gradients are averaged."""
        warm_start = self.warm_start
        return warm_start if warm_start is not None and warm_start.active else None

    # The optimizer that torch knows: groups and state are the inner optimizer's

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Only torch.optim.Optimizer's constructor sets it; the inner optimizer keeps its own."""

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        """Only torch.optim.Optimizer's constructor sets it; the inner optimizer keeps its own."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if any(param_group is group for group in self.inner.param_groups):
            return  # torch.optim.Optimizer's constructor, with the groups that the inner optimizer already has
        raise ConfigError(
            "parameters cannot be added after DiLoCo was built: they would not be averaged. "
            "Add them to the inner optimizer first, then build DiLoCo"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict with one more entry, "diloco", for the outer loop.

        Waits for rounds in flight, which stay unmerged: call it on every worker after the same round was posted.
        """
        self.loop.refuse_while_evaluating()
        self.loop.settle()
        tensors, numbers = self.loop.saved()
        state = super().state_dict()
        state["diloco"] = {
            "tensors": as_tensors(tensors),
            "numbers": numbers | {"skipped": self.skipped_steps, "worker": self.loop.engine.worker},
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where state_dict() was taken; load the model's own state dict too."""
        self.loop.refuse_while_evaluating()
        if "diloco" not in state_dict:
            raise ConfigError(
                'this state dict has no entry "diloco": it is not from DiLoCo.state_dict(). If it is the inner '
                "optimizer's own, load it into that (optimizer.inner.load_state_dict) on every worker before the first "
                "step, and the model's before DiLoCo is built"
            )
        saved = state_dict["diloco"]
        self._refuse_work_of_another(saved["numbers"])
        memory, loaded = self.loop.memory_to_load(saved["numbers"])
        copy_into(memory, saved["tensors"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "diloco"})
        loaded()
        self.skipped_steps = saved["numbers"]["skipped"]

    def _refuse_work_of_another(self, numbers: dict[str, Any]) -> None:
        """Refuse a state from the middle of another worker's round, whose work would be in the mean twice."""
        theirs = numbers.get("worker")
        own = self.loop.engine.worker
        merged_at = [numbers[f"{index}.merged_at"] for index in range(self.loop.state.num_tensor_groups)]
        steps = numbers["inner_steps"] - numbers.get("jumped", 0) - min(merged_at)
        if theirs in (None, own) or self.loop.engine.elastic or not (steps or numbers["in_flight"]):
            return
        raise ConfigError(
            f"this state is worker {theirs}'s in the middle of a round ({steps} inner steps after the last), and this "
            f"is worker {own}: its work would be in the mean twice. Save a state on every worker after the same step, "
            "and load each worker's own; or load one that was saved right after a round, which all workers may share"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("DiLoCo is bound to an engine and cannot be copied or pickled: save its state_dict()")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner.__setstate__(state)


# At the end of a run, where no error says that it went wrong


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
        """Never warn: the caller sees to the end itself, or has no other worker."""
        self._finalizer.detach()

    def _warn(self) -> None:
        if not self.steps or sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None:
            return
        logger.warning(
            "worker %d ended without optimizer.finish(), %d steps after its last round: these steps are in no mean, "
            "and its parameters are not the other workers'. Call optimizer.finish() after the loop on every worker, or "
            "give the Trainer its callback (diloco.integrations)",
            self._worker,
            self.steps,
        )


def warn_of_few_rounds(steps: int, loop: OuterLoop) -> None:
    """Warn after a single round: the outer optimizer has hardly moved, and training without DiLoCo is better."""
    if max(loop.state.merged_rounds) == 1:
        logger.warning(
            "the run ended after %d steps and a single round, since H = %d: the workers have averaged once only, "
            "which is worse than training on one of them. Choose H for ten rounds or more (H = %d), and for a "
            "handful of rounds plain averaging: outer=diloco.SGD(lr=1.0)",
            steps,
            loop.sync.num_inner_steps,
            max(1, steps // 10),
        )
