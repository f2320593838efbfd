"""Regular checks of this worker's own place in the swarm: has it missed a round, gone on alone, lost all others?"""

import logging
from collections.abc import Callable

from diloco.swarm.node import clock
from diloco.swarm.node.participant import Participant
from diloco.swarm.trainer import Trainer

logger = logging.getLogger(__name__)


class OwnChecks:
    def __init__(
        self, participant: Participant, trainer: Trainer, emit: Callable[[str, dict[str, object]], None]
    ) -> None:
        self._participant = participant
        self._trainer = trainer
        self._emit = emit
        self._members = participant.members
        self._recent = participant.outcomes.recent
        self._own = self._members.status
        self._alone = self._minority = False
        self._diverged_since: float | None = None

    def run(self) -> None:
        self._check_missed()
        self._check_diverged()
        self._check_alone()
        self._check_minority()

    def _check_missed(self) -> None:
        """Most others have ended a round that this worker has not posted.

        It posts now; its post will fail, which makes it fetch the others' state.
        """
        sequence = self._own.next_round
        if self._own.has_state and sequence not in self._participant.rounds and self._members.most_ended(sequence):
            self._own.lose_state()
            self._trainer.post_now(sequence)

    def _check_diverged(self) -> None:
        """Most others are behind, and were not in this worker's last round: it was cut off and went on alone.

        Only members that have contributed to a round are counted, however many join at once.
        """
        last = self._recent.get(self._own.ended_round)
        known = [peer for peer in self._members.with_state() if peer.status.contributed_round >= 0]
        behind = [peer for peer in known if peer.status.ended_round < self._own.ended_round]
        others = [peer for peer in behind if last is None or last.plan.entry(peer.name) is None]
        decided = last is not None and last.plan.majority
        if not self._own.has_state or decided or 2 * len(others) <= 1 + len(known):
            self._diverged_since = None
            return
        self._diverged_since = self._diverged_since or clock.now()
        if clock.now() - self._diverged_since > self._members.settings.lost_seconds:
            self._participant.outcomes.record_divergence()
            self._own.fall_back(others[0].status.ended_round)
            for round_ in list(self._participant.rounds.values()):
                round_.fail("this worker has gone on without most others", resync=True)
            self._trainer.post_now(self._own.next_round)

    def _check_alone(self) -> None:
        alone = not self._members.live() and self._members.excluded is None
        if alone and not self._alone and len(self._members.numbers) > 1:
            self._emit("alone", {"number": self._own.number})
            logger.warning("no other worker is live: this worker trains alone until another one joins or returns")
        self._alone = alone

    def _check_minority(self) -> None:
        quorum = self._participant.outcomes.quorum
        minority = not quorum.sees_majority() and self._members.excluded is None
        if minority and not self._minority:
            live = 1 + len(self._members.live())
            counted = len(quorum.counting_members())
            self._emit("minority", {"number": self._own.number, "here": live, "members": counted})
            logger.warning("%d of %d members are here: no round ends until there are more than half", live, counted)
        self._minority = minority
