"""The rounds of a run, from its options alone: when they are, and how many. Torch-free."""

from diloco.core.methods.round_lengths import GrowingRounds, LearningRateCurve
from diloco.core.schedule import Schedule
from diloco.training.config.run import RunConfig
from diloco.training.config.tables import InnerConfig


def learning_rates(inner: InnerConfig, steps: int) -> LearningRateCurve:
    """Of the inner optimizer in a run of so many steps."""
    return LearningRateCurve(inner.lr, steps, inner.warmup_steps, inner.final_lr_ratio)


def turns(config: RunConfig) -> Schedule:
    """The schedule of a model of one fragment: with several, each of them is averaged once in the same steps."""
    sync = config.sync
    growth = None if sync.growth is None else GrowingRounds(sync.growth, learning_rates(config.inner, config.steps))
    return Schedule(sync.num_inner_steps, (0,), sync.overlap_steps, sync.warm_start, growth)


def num_rounds(config: RunConfig) -> int:
    """Rounds of each fragment in the whole run, the last one perhaps with fewer steps."""
    return turns(config).turns_until(config.steps)
