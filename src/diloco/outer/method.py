"""The one interface through which a method beyond plain rounds enters the outer loop.

A method is a subclass of `Method` in a file of diloco/methods/, and the loop has a list of those that a run has. It
calls their hooks where this file says; without a method that list is empty, and the plain algorithm runs. A hook that a
method leaves out does nothing. To add one: the file, its option in core/config.py, a line in methods/registry.py, a row
in docs/methods.md.

What is a method's own (a memory beside the anchor, a measured speed) is kept, saved and loaded by it. The hooks are
called in the trainer's thread, but for the functions that `gradient` and `encoder` return.
"""

# ruff: noqa: ARG002, B027 - hooks that a method leaves out do nothing

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from torch import Tensor
from torch.optim import Optimizer

from diloco.codecs.encoded import EncodedVector
from diloco.core.config import FaultsConfig, SyncConfig
from diloco.core.fragments import Fragment, Span
from diloco.core.lanes import Piece
from diloco.core.schedule import Schedule
from diloco.engines.base import Connection
from diloco.engines.rounds import Member, Report
from diloco.outer.sending import Group
from diloco.outer.tensors import Numbers

GradientSource = Callable[[int, Tensor | None], Iterator[tuple[Span, Tensor]]]
"""(turn, a flat copy of the parameters or None for themselves) -> a fragment's outer gradient, span by span."""
SpanEncoder = Callable[[EncodedVector, Span, Tensor], Tensor]
"""(vector, span, outer gradient) -> the norm of what is sent: it writes the span into the vector."""
Means = Sequence[EncodedVector] | None
"""One encoded mean for each lane of this rank; None: none that has this worker's contribution in it."""


class Position(Protocol):
    """The place of a worker in the schedule (outer/state.py)."""

    inner_steps: int

    @property
    def steps_taken(self) -> int:
        """The inner steps of this worker itself."""

    def jump_to(self, position: int) -> None:
        """Move forward to a position; the steps between count as no work of this worker's."""


@dataclass(frozen=True)
class TrainingWorker:
    """All that a method may know of the worker that it is a part of."""

    engine: Connection
    schedule: Schedule
    position: Position
    training_seconds: Callable[[], float]
    """A clock that stands still during rounds and evaluations, and waits for steps that a GPU has not finished."""


@dataclass(frozen=True)
class LaneFragment:
    """One fragment as one lane of this rank holds it."""

    index: int
    """The number of the fragment."""
    lane: int
    """The place of the lane among those of this rank."""
    group: Group
    fragment: Fragment
    pieces: Sequence[Piece]
    engine: Connection


@dataclass(frozen=True)
class Options:
    """The options and objects of a run by which its methods are chosen."""

    sync: SyncConfig
    faults: FaultsConfig
    engine: Connection
    inner: Optimizer
    parameters: Mapping[str, Tensor]
    """The parameters that are averaged."""


class Method(ABC):
    """One method of one worker. All hooks but the first have their default here."""

    @classmethod
    @abstractmethod
    def chosen(cls, options: Options) -> Self | None:
        """Build the method if these options ask for it."""

    travels_a_turn: ClassVar[bool] = False
    """A round is merged when its fragment is posted next, and the parameters do not follow its mean."""

    # While the loop is built

    def groups(self) -> Sequence[Group]:
        """Return the groups that are averaged besides the model's own tensors."""
        return ()

    def gradient(self, place: LaneFragment) -> GradientSource | None:
        """Return what computes a fragment's outer gradient in place of anchor − θ_i; None: that is sent."""
        return None

    def encoder(self, place: LaneFragment) -> SpanEncoder | None:
        """Return the encoder of a fragment's outer gradient; None: the codec alone."""
        return None

    def begin(self, worker: TrainingWorker) -> None:
        """Called when all is laid out, and nothing has been sent yet."""

    # After an inner step

    def positions(self, reached: range, end: int | None) -> range:
        """Return the positions of the schedule that the step has reached; `end` is that of the run, if it is known."""
        return reached

    # A round

    def drops(self, sequence: int) -> bool:
        """Whether this worker's outer gradient of that round is dropped on purpose."""
        return False

    def report(self, report: Report) -> Report:
        """Complete the report for the header of the next round."""
        return report

    def heard(self, members: Sequence[Member]) -> None:
        """Take what the headers of a round have told of the workers."""

    def ended(self, index: int, means: Means) -> None:
        """Called when a round of this fragment is over; `means` have this worker's contribution in them, None: none
        has."""

    def take_back(self, index: int, turn: int) -> bool:
        """Called when a round has failed; whether the fragment's next outer gradient carries its work again."""
        return True

    # Anchors and parameters

    def at_anchor(self, index: int) -> None:
        """Called when the parameters of this fragment have become its anchor."""

    def work_dropped(self, index: int) -> None:
        """Called when this worker's own work on the fragment was given up for the others' anchor."""

    def moving_anchors(self, indices: Iterable[int]) -> AbstractContextManager[None]:
        """Entered while the others' anchors of these fragments come in place of this worker's."""
        return nullcontext()

    def begin_anew(self) -> None:
        """Called when the state was another worker's: what was measured of its training does not count."""

    # Saving

    def saved_tensors(self, index: int, means: Means) -> dict[str, list[Tensor]]:
        """Return flat buffers of the fragment's size by name, one for each lane that has it; `means` as in `ended`, in
        flight.

        They are views: a saved state is loaded by writing into them.
        """
        return {}

    def saved_numbers(self) -> Numbers:
        return {}

    def loaded(self, numbers: Numbers) -> None:
        """Called when a saved state was loaded; `numbers` has what `saved_numbers` gave, if that version saved it."""
