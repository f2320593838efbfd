"""Regular checks of this worker's own place in the swarm: has it missed a round, gone on alone, lost all others?"""

import logging
from collections.abc import Callable

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
        self._own = participant.members.status
        self._was_alone = False
        self._was_minority = False

    def run(self) -> None:
        self._check_missed()
        self._check_diverged()
        self._check_alone()
        self._check_minority()

    def _check_missed(self) -> None:
        """A worker that missed a round posts it now; that fails, which makes it fetch the others' state."""
        missed = self._participant.follower.missed_round()
        if missed is not None:
            self._own.lose_state()
            self._trainer.post_now(missed)

    def _check_diverged(self) -> None:
        """A worker that went on alone gives up its rounds, and takes over the others' state."""
        last = self._participant.outcomes.recent.get(self._own.ended_round)
        others_ended = self._participant.follower.went_on_alone_after(None if last is None else last.plan)
        if others_ended is None:
            return
        self._participant.outcomes.record_divergence()
        self._own.fall_back(others_ended)
        for round_ in list(self._participant.rounds.values()):
            round_.fail("this worker has gone on without most others", resync=True)
        self._trainer.post_now(self._own.next_round)

    def _check_alone(self) -> None:
        alone = not self._members.live() and self._members.excluded is None
        if alone and not self._was_alone and len(self._members.numbers) > 1:
            self._emit("alone", {"number": self._own.number})
            logger.warning("no other worker is live: this worker trains alone until another one joins or returns")
        self._was_alone = alone

    def _check_minority(self) -> None:
        quorum = self._participant.outcomes.quorum
        minority = not quorum.sees_majority() and self._members.excluded is None
        if minority and not self._was_minority:
            live = 1 + len(self._members.live())
            counted = len(quorum.counting_members())
            self._emit("minority", {"number": self._own.number, "here": live, "members": counted})
            logger.warning("%d of %d members are here: no round ends until there are more than half", live, counted)
        self._was_minority = minority
