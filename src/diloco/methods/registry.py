"""The methods beyond plain rounds that enter through outer/method.py.

To add one: a subclass of Method in a file of this folder, its option in core/config.py, a line here, a row in
docs/methods.md; what it does not go together with is a row of REFUSED_COMBINATIONS in core/config.py. Three files of
this folder have no line here: optimizer.py takes the steps of a warm start, the schedule is given the lengths of
growing rounds, and asynchronous workers have an outer loop of their own.
"""

from diloco.methods.dropped_rounds import DroppedRounds
from diloco.methods.dynamic_steps import DynamicSteps
from diloco.methods.eager import EagerUpdates
from diloco.methods.error_feedback import Feedback
from diloco.methods.pruning import Pruning
from diloco.methods.second_moments import SecondMoments
from diloco.outer.method import Method, Options

METHODS: tuple[type[Method], ...] = (EagerUpdates, Pruning, Feedback, SecondMoments, DynamicSteps, DroppedRounds)


def chosen_methods(options: Options) -> list[Method]:
    """Build the methods that a run's options ask for."""
    chosen = (kind.chosen(options) for kind in METHODS)
    return [method for method in chosen if method is not None]
