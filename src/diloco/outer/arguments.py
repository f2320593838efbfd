"""The arguments of DiLoCo, checked before anything is sent: a mistake is a ConfigError that names the remedy."""

import gc
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco.codecs.registry import codec
from diloco.core.config import (
    FEWEST_TO_MERGE,
    NO_FAULTS,
    REFUSED_BY_RANKS_IN_A_SWARM,
    FaultsConfig,
    RefusedByRanks,
    SyncConfig,
    refuse_combinations,
)
from diloco.core.outer_optimizers import OUTER_OPTIMIZERS, Nesterov, OuterOptimizer
from diloco.engines.asynchronous import FixedEngine
from diloco.engines.base import Connection
from diloco.errors import ConfigError
from diloco.outer.loop import OuterLoop

_ORDER = "the order is DiLoCo(model, optimizer, engine)"


def check_model_inner_engine(model: object, inner: object, engine: object) -> None:
    """Check the three in their order, and that rounds are possible with the engine."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is {described(model)}, and must be a torch.nn.Module: {_ORDER}")
    _check_inner(inner)
    if not isinstance(engine, Connection):
        raise ConfigError(
            f"the engine is {described(engine)}, and must be what diloco.connect(), diloco.join_swarm() or "
            f"diloco.alone() returns: {_ORDER}"
        )
    if engine.closed:
        raise ConfigError(
            f"the engine of worker {engine.worker} is closed, and no round is possible with it: build DiLoCo before "
            "engine.close(), or connect again"
        )


def _check_inner(inner: object) -> None:
    wrapped = getattr(inner, "optimizer", None)  # what Accelerate has prepared
    if any(isinstance(getattr(candidate, "loop", None), OuterLoop) for candidate in (inner, wrapped)):
        raise ConfigError(
            "the optimizer is a DiLoCo already, and would post every round twice: use it as it is, or give the one "
            "inside it (optimizer.inner)"
        )
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer is {described(inner)}, and must be a torch.optim.Optimizer: {_ORDER}")


def check_replicas(model: nn.Module, engine: Connection) -> None:
    """Refuse a DistributedDataParallel over several workers, whichever of the two, it or DiLoCo, was built first.

    It averages gradients at every step: the workers would never differ, and a run would be data-parallel in silence.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = {dist.get_rank()} if engine.ranks.count == 1 else set(dist.get_process_group_ranks(engine.ranks.group))
    parameters = {id(parameter) for parameter in model.parameters()}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), DistributedDataParallel):
            continue
        if parameters.isdisjoint(id(parameter) for parameter in candidate.parameters()):
            continue
        ranks = dist.get_process_group_ranks(candidate.process_group)
        if not set(ranks) <= own:
            raise ConfigError(
                f"the model is in a DistributedDataParallel over {len(ranks)} processes (ranks "
                f"{', '.join(map(str, ranks))}), and this worker has {len(own)} of them: it averages the gradients of "
                "all workers at every step, which is data-parallel training and leaves DiLoCo nothing to average. Give "
                "the bare model to DiLoCo and to your loop; for several processes in one worker, connect with "
                "diloco.connect(ranks_per_worker=N) and wrap with process_group=engine.ranks.group"
            )


def sync_config(sync: object, H: object) -> SyncConfig:
    """Return `sync`, or the defaults with H inner steps between two rounds."""
    if sync is not None and not isinstance(sync, SyncConfig):
        number = f" (H = {sync} inner steps between two rounds: H={sync})" if isinstance(sync, int) else ""
        raise ConfigError(
            f"sync is {described(sync)}, and must be a diloco.SyncConfig, such as "
            f"diloco.SyncConfig(num_inner_steps=30){number}"
        )
    if isinstance(sync, SyncConfig):
        codec(sync.codec)
    if H is None:
        return sync or SyncConfig()
    try:
        steps = operator.index(H)  # type: ignore[arg-type]
    except TypeError:
        steps = 0
    if isinstance(H, bool) or steps < 1:
        raise ConfigError(f"H is {described(H)}, and must be a whole number of inner steps, at least 1: H=30")
    if sync is not None and sync.num_inner_steps != steps:
        raise ConfigError(
            f"H = {steps}, but sync.num_inner_steps = {sync.num_inner_steps}, which is the same thing: give one of them"
        )
    return sync or SyncConfig(num_inner_steps=steps)


def chosen_outer(outer: object) -> OuterOptimizer:
    """Return the outer optimizer that was given, itself or by name; Nesterov 0.7 / 0.9 if it was left out."""
    if outer is None:
        return Nesterov()
    if isinstance(outer, OuterOptimizer):
        return outer
    if isinstance(outer, str) and outer in OUTER_OPTIMIZERS:
        return OUTER_OPTIMIZERS[outer]()
    own = ", ".join(f"diloco.{kind.__name__}" for kind in OUTER_OPTIMIZERS.values())
    why = " (it would step the model's parameters, not the anchor)" if isinstance(outer, torch.optim.Optimizer) else ""
    raise ConfigError(
        f"outer is {described(outer)}{why}, and must be one of diloco's outer optimizers ({own}), such as "
        f"diloco.SGD(lr=1.0), or a name: {', '.join(OUTER_OPTIMIZERS)}"
    )


@dataclass(frozen=True)
class Arguments:
    """The arguments of a DiLoCo, as far as one must fit another."""

    sync: SyncConfig
    engine: Connection
    outer: OuterOptimizer
    has_learning_rates: bool = False
    restoring: bool = False
    faults: FaultsConfig = NO_FAULTS


@dataclass(frozen=True)
class RefusedArguments:
    """Arguments that are each valid and do not fit each other; what of them is in SyncConfig alone is in its table."""

    names: tuple[str, str]
    applies: Callable[[Arguments], bool]
    message: str
    """Why, and what to do; {sync.growth} is replaced by that value."""

    def text(self, arguments: Arguments) -> str:
        return self.message.format(
            sync=arguments.sync,
            engine=arguments.engine,
            outer=described(arguments.outer),
            fewest_to_merge=FEWEST_TO_MERGE[arguments.sync.merge],
        )


def _by_ranks_in_a_swarm(refused: RefusedByRanks) -> RefusedArguments:
    return RefusedArguments(
        (refused.option, "ranks"),
        lambda arguments: (
            arguments.engine.elastic and arguments.engine.ranks.count > 1 and refused.applies(arguments.sync)
        ),
        refused.message,
    )


REFUSED_ARGUMENTS: tuple[RefusedArguments, ...] = (
    RefusedArguments(
        ("sync.merge", "engine"),
        lambda arguments: (
            not arguments.engine.elastic
            and arguments.sync.merge != "mean"
            and arguments.engine.workers < FEWEST_TO_MERGE[arguments.sync.merge]
        ),
        "sync.merge = {sync.merge} with {engine.workers} workers: among fewer than {fewest_to_merge} "
        "no contribution can be told from the others; leave it out",
    ),
    RefusedArguments(
        ("sync.asynchronous", "engine"),
        lambda arguments: arguments.sync.asynchronous and not isinstance(arguments.engine, FixedEngine),
        "sync.asynchronous = true is for a fixed set of workers of one rank, over the local engine or "
        "torch.distributed, where worker 0 holds the anchor; a swarm has no such worker, and its members are not "
        "waited for longer than patience allows: leave it out there",
    ),
    RefusedArguments(
        ("sync.asynchronous", "outer"),
        lambda arguments: (
            arguments.sync.asynchronous
            and (not isinstance(arguments.outer, Nesterov) or arguments.outer.course is not None)
        ),
        "sync.asynchronous = true needs the outer optimizer 'nesterov' with constant numbers, whose momentum is "
        "delayed, and outer is {outer}: leave outer out, or give diloco.Nesterov(lr=..., momentum=...)",
    ),
    RefusedArguments(
        ("sync.growth", "learning_rates"),
        lambda arguments: arguments.sync.growth is not None and not arguments.has_learning_rates,
        "sync.growth = {sync.growth} makes rounds longer as the inner learning rate falls, which all workers "
        "must know in advance: give DiLoCo learning_rates=diloco.LearningRateCurve(peak=..., total_steps=...)",
    ),
    RefusedArguments(
        ("learning_rates", "sync.growth"),
        lambda arguments: arguments.sync.growth is None and arguments.has_learning_rates,
        "learning_rates has no effect without sync.growth: leave it out, or give that too",
    ),
    RefusedArguments(
        ("sync.second_moment_every", "engine"),
        lambda arguments: arguments.sync.second_moment_every is not None and set(arguments.engine.sizes) != {1},
        "sync.second_moment_every = {sync.second_moment_every} is for workers of one rank: leave it out",
    ),
    RefusedArguments(
        ("sync.warm_start", "engine"),
        lambda arguments: arguments.sync.warm_start > 0 and set(arguments.engine.sizes) != {1},
        "sync.warm_start = {sync.warm_start} is for workers of one rank, and these have several: train these "
        "steps with --ranks 1, and begin the run with the model that they give",
    ),
    RefusedArguments(
        ("restoring", "engine"),
        lambda arguments: arguments.engine.elastic and arguments.restoring,
        "restoring = True has no effect in a swarm, where a worker always asks the others for their state: leave it "
        "out",
    ),
    *map(_by_ranks_in_a_swarm, REFUSED_BY_RANKS_IN_A_SWARM),
)
"""All arguments that are refused together, in the order in which they are looked for."""


def refuse_arguments(arguments: Arguments) -> None:
    """Raises ConfigError for the first row of REFUSED_ARGUMENTS or REFUSED_COMBINATIONS that these arguments match."""
    for refused in REFUSED_ARGUMENTS:
        if refused.applies(arguments):
            raise ConfigError(refused.text(arguments))
    refuse_combinations(arguments.sync, arguments.faults)


def described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}, which was not called"
    if isinstance(value, (str, int, float)):
        return repr(value)
    return "None" if value is None else f"of type {type(value).__module__}.{type(value).__qualname__}"
