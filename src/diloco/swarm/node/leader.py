"""The rounds that this node leads at the moment, and the messages of their workers.

The first Ready of a round makes the leader start a LedRound (led_round.py). The leader also learns how long rounds
usually take, led here or elsewhere: that is how long it waits for slow workers.
"""

import statistics
from collections import deque
from collections.abc import Callable

from diloco.swarm.network.transport import CallRefused
from diloco.swarm.node import clock
from diloco.swarm.node.led_round import LedRound
from diloco.swarm.node.participant import Participant
from diloco.swarm.protocol import timing
from diloco.swarm.protocol.membership import clashes
from diloco.swarm.protocol.messages import Complete, Done, Ended, NotLeader, Opposed, Ready, Trouble, Waiting
from diloco.swarm.protocol.plan import Entry
from diloco.swarm.protocol.shares import Shares
from diloco.swarm.protocol.troubles import Quarrels
from diloco.swarm.protocol.wire import PeerMessage


class Leader:
    def __init__(self, participant: Participant, hurry: Callable[[str, int], None]) -> None:
        """`hurry(peer, sequence)`: have a slow worker post the work that it has."""
        self.participant = participant
        self.hurry = hurry
        self.members = participant.members
        self.settings = participant.settings
        self.shares = Shares(self.members, participant.transfers)
        self.quarrels = Quarrels(self.members.me)
        self._rounds: dict[int, LedRound] = {}
        self._usual_seconds: deque[float] = deque(maxlen=5)
        """The seconds from the end of a round until half of the workers were ready for the next one, in the last
        rounds."""
        self._started = clock.now()
        self._last_end: float | None = None
        """When a round last ended, led here or elsewhere."""
        self._too_few: dict[str, int] = {}
        """Worker -> the round for which no plan could be made, as too few were left; it is told so when it asks
        again."""

    # Messages of workers

    def answer_ready(self, sender: str, ready: Ready) -> PeerMessage:
        entry = Entry(sender, ready.contribution)
        key = entry.parsed.key
        if self.participant.outcomes.has_ended(key.sequence):
            return Ended()
        led = self._rounds.get(key.sequence)
        if led is None and self.members.leader() != self.members.me:
            return NotLeader()
        if entry.number != self.members.number_of(sender) or clashes(self.members, sender):
            raise CallRefused(f"{entry.number} is the number of another worker, or not yet this one's here", "number")
        if self._too_few.pop(sender, None) == key.sequence:  # if it asks again, it is tried again
            raise CallRefused("too few workers are left in this round", "few")
        if led is None:
            led = self._rounds[key.sequence] = LedRound(self, key)
            self.members.faults.start(led.run(), "leading a round")
        led.add(entry, ready.max_norm_ratio, ready.merge)
        return Waiting()

    def record_complete(self, sender: str, message: Complete) -> PeerMessage:
        if (led := self._current(sender, message)) is None:
            return self.participant.compare_ranges(message)
        led.record_vote(sender, message.vote)
        return Done()

    def record_trouble(self, sender: str, message: Trouble) -> PeerMessage:
        if (led := self._current(sender, message)) is not None:
            led.troubles.add(sender, message)
            self.members.changed()
        return Done()

    def record_opposed(self, sender: str, message: Opposed) -> PeerMessage:
        """Raises Malformed."""
        if (led := self._current(sender, message)) is not None:
            led.record_opposed(message)
        return Done()

    def _current(self, sender: str, message: Complete | Trouble | Opposed) -> LedRound | None:
        """The round that the message is about, if it is about the plan that is carried out now."""
        led = self._rounds.get(message.sequence)
        if led is None or led.plan is None or led.authority != message.authority or led.plan.entry(sender) is None:
            return None
        return led

    # How long rounds take

    @property
    def patience_seconds(self) -> float:
        """How long a round waits for the others after half of the workers are ready."""
        since = clock.now() - (self._last_end or self._started)
        usual = statistics.median(self._usual_seconds) if self._usual_seconds else since
        return max(timing.LEAST_PATIENCE_SHARE * self.settings.lost_seconds, self.settings.patience * usual)

    def record_end(self, led: LedRound) -> None:
        self._rounds.pop(led.key.sequence, None)
        if led.too_few:
            self._too_few |= dict.fromkeys(led.ready, led.key.sequence)
        if led.half_ready_at is not None and self._last_end is not None:
            self._usual_seconds.append(led.half_ready_at - self._last_end)
        self._last_end = clock.now()
        self.members.changed()

    def record_end_elsewhere(self, sequence: int) -> None:
        """This worker has ended a round that another leads: if that leader is lost, this node knows how long rounds
        take."""
        own = self.participant.rounds.get(sequence)
        if own is None or sequence in self._rounds:
            return
        if self._last_end is not None:
            self._usual_seconds.append(max(0.0, own.started - self._last_end))
        self._last_end = clock.now()

    # State

    def phases(self) -> dict[int, str]:
        """The rounds that this node leads, and the phase of each."""
        return {sequence: led.phase.value for sequence, led in self._rounds.items()}

    async def wait_for_earlier(self, sequence: int) -> bool:
        """Wait until no earlier round is led here: rounds end in their order. Return whether there was one."""
        waited = False
        while any(other < sequence for other in self._rounds):
            waited = True
            await self.members.wait_for_change(timing.POLL_SECONDS)
        return waited
