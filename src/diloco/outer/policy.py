"""The policy of a run: what is due, what a round does, what a missed round means, which workers stop together.

fixed.py, elastic.py and methods/asynchronous.py are the policies there are. A new way to merge is a policy too: `merge`
says what a round's mean does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar

from diloco.engines.rounds import RoundResult
from diloco.errors import RoundFailed
from diloco.outer.rounds import Outcome, Posted


class Policy(ABC):
    """Asked by the outer loop, which it also drives; it remembers what its worker missed."""

    serves_copies: ClassVar[bool] = False
    """Other workers get this worker's state as copies, at any moment and in another thread."""

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """This worker must leave its training loop and finish, because another one stops."""

    @abstractmethod
    def join(self) -> None:
        """Before the first inner step: serve this worker's state, and take over the others'."""

    @abstractmethod
    def due(self) -> Iterable[int]:
        """The fragments to post after the inner steps taken so far, in order."""

    @abstractmethod
    def heard(self, posted: Posted, result: RoundResult) -> None:
        """A round has a result; its mean is not merged yet."""

    @abstractmethod
    def failed(self, posted: Posted, failure: RoundFailed) -> None:
        """A round gave no result."""

    @abstractmethod
    def refused_for_its_anchor(self, posted: Posted) -> None:
        """The others refused this worker's contribution, because its anchor is not theirs."""

    @abstractmethod
    def merge(self, posted: Posted, outcome: Outcome) -> float | None:
        """What a round's mean does: `loop.outer_step`, or something else. The mean's norm if it moved the anchor."""

    @abstractmethod
    def after_round(self, posted: Posted) -> None:
        """A round is over, with or without a mean."""

    @abstractmethod
    def finish(self, *, early: bool, before_confirming: Callable[[], None]) -> None:
        """See DiLoCo.finish."""

    def settle(self) -> None:  # noqa: B027 - most policies have nothing of their own to save
        """Before the state is saved."""

    @abstractmethod
    def unsavable(self) -> str | None:
        """Why the state of this moment is not one to go on from, if it is not; rounds in flight are settled."""

    @abstractmethod
    def loaded(self) -> None:
        """A saved state was loaded: nothing is missed any more."""
