"""Which members a worker without the state of the run asks for it, in which order, and when it asks no longer.

A newcomer needs the state of a member. A worker that was in rounds has one of its own, which is older than the others'
or not theirs: it goes on with that where no member can show a later one.
"""

import random

from diloco.errors import EngineError
from diloco.swarm import timing
from diloco.swarm.protocol.membership import Membership, Peer


class StateSearch:
    def __init__(self, members: Membership, kept_rounds: int) -> None:
        """`kept_rounds`: for how many rounds each member keeps the means."""
        self._members = members
        self._stall_seconds = members.settings.stall_seconds
        self._kept_rounds = kept_rounds
        self._failed: set[str] = set()
        """Sources that were asked and have not given the state."""
        self._without_means: set[str] = set()
        """Sources that no longer keep the means which the trainer lacks, or show others."""
        self._random = random.Random(members.me)  # each node asks the sources in an order of its own
        self._last_source = 0.0
        """When a member that has the state was last there."""

    def begin(self) -> None:
        """This worker begins to look for the state."""
        self._last_source = self._members.now()

    # Sources

    def sources(self, next_to_merge: int | None) -> list[Peer]:
        """Return the members with the state, in the order in which they are asked: those that have failed come last, of
        the others the furthest first, equal ones at random. A single member that says that it is ahead of all others
        comes no earlier than the second one: any member can say so. Nor do a few that are far ahead of this worker come
        early: they are a run of their own.

        `next_to_merge`: the first round that is not in this worker's own state; None for a newcomer.
        """
        sources = self._members.with_state()
        self._random.shuffle(sources)
        furthest = sorted(peer.status.ended_round for peer in sources)[-2:]
        far: set[str] = set()
        if next_to_merge is not None:
            far = {peer.name for peer in sources if peer.status.ended_round >= next_to_merge + self._kept_rounds}
        if 2 * len(far) >= len(sources):
            far = set()
        if sources:
            self._last_source = self._members.now()

        def order(peer: Peer) -> tuple[bool, bool, int]:
            return peer.name in self._failed, peer.name in far, -min(peer.status.ended_round, furthest[0])

        return sorted(sources, key=order)

    def record_asked(self, source: str) -> None:
        """The source counts as one that has failed, until a state has arrived."""
        self._failed.add(source)

    def record_without_means(self, source: str) -> None:
        """The state of this source, as most have it, must tell what its means do not."""
        self._without_means.add(source)

    def may_have_means(self, source: str) -> bool:
        """Whether the source may keep the means that this worker's own state lacks."""
        return source not in self._without_means

    def forget(self) -> None:
        """A state has arrived."""
        self._without_means.clear()
        self._failed.clear()

    # The end of the search

    def is_alone(self, *, is_newcomer: bool) -> bool:
        """Whether all members with the state are gone, so that this worker's own is the latest. Raises EngineError for
        a newcomer."""
        share = timing.NO_SOURCE_JOINER_SHARE if is_newcomer else timing.NO_SOURCE_SHARE
        if self._members.now() - self._last_source <= share * self._stall_seconds:
            return False
        if is_newcomer:
            raise EngineError(
                "no worker that has the state of this run answers: the others have ended or cannot be reached. "
                "Ask for a new invitation, or resume from a checkpoint where there is one"
            )
        return True

    def none_is_later(self, sources: int, disagreement_seconds: float, *, is_newcomer: bool) -> bool:
        """Whether only one of `sources` is left, and cannot show that its state is ahead of this worker's. Raises
        EngineError for a newcomer, if no state is that of most for long."""
        if disagreement_seconds <= timing.DISAGREEMENT_SHARE * self._stall_seconds:
            return False
        if is_newcomer:
            raise EngineError(
                "the members of this run do not agree on its state, and none has it as most others have: ask the "
                "owner of the run which of them to trust"
            )
        return sources == 1
