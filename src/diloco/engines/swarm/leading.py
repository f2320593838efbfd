"""The rounds that this node leads, and what members tell it of them; how one goes is led_round.py.

The live member with the lowest number that has the state leads. It also keeps what is usual: how long the time between
two rounds is, by which a round's patience with slow workers is measured.
"""

import asyncio
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

from diloco.engines.swarm.led_round import LedRound
from diloco.engines.swarm.membership import Membership
from diloco.engines.swarm.plan import MAX_NOTE_BYTES, Entry, authority_from
from diloco.engines.swarm.taking_part import TakingPart
from diloco.engines.swarm.wire import Malformed, Message, pack

_POLL_SECONDS = 0.25
_LEAST_PATIENCE = 0.2  # times `lost_seconds`
_ROUNDS_AHEAD = 64  # that somebody may be of this node without being taken for a fool


class Leading:
    """The rounds that this node leads at the moment."""

    def __init__(self, membership: Membership, taking_part: TakingPart, call: Callable[[str, int], None]) -> None:
        """`call(peer, sequence)`: have a slow worker post what it has."""
        self.membership, self.taking_part, self.call = membership, taking_part, call
        self.settings = membership.settings
        self._leads: dict[int, LedRound] = {}
        self._usual: deque[float] = deque(maxlen=5)  # seconds between the end of a round and half being ready again
        self._began = time.monotonic()
        self._last_end: float | None = None  # of a round, led here or elsewhere
        self._tasks: set[asyncio.Task[None]] = set()
        self.misses: Counter[str] = Counter()
        """How many rounds in a row members have missed although they were called."""

    # What members say

    async def told(self, sender: str, message: Message) -> bytes:
        """ready, complete, trouble."""
        if message.kind == "ready":
            return pack("answer", **self._ready(sender, message))
        lead = self._leads.get(message.number("sequence"))
        authority = authority_from(message.items("authority"))
        if lead is not None and lead.authority == authority and lead.plan is not None and lead.plan.entry(sender):
            if message.kind == "complete":
                lead.completes.add(sender)
            else:
                lead.troubles.append((sender, message.text("peer"), message.text("reason"), message.flag("lie")))
            self.membership.changed()
        return pack("answer", state="heard")

    def _ready(self, sender: str, message: Message) -> dict[str, object]:
        sequence, status = message.number("sequence"), self.membership.status
        if self.taking_part.kept.has(sequence) or sequence <= status.ended:
            return {"state": "ended"}
        lead = self._leads.get(sequence)
        ahead = [peer for peer in self.membership.live() if peer.status.ended > status.ended]
        too_far = sequence > max(status.next, status.ended + 1) + _ROUNDS_AHEAD
        if lead is None and (
            self.membership.leader() != self.membership.me or too_far or (ahead and sequence > status.ended + 1)
        ):
            return {"state": "elsewhere"}
        number = self.membership.number_of(sender)
        entry = Entry(sender, number, message.data("header"), message.data("note", MAX_NOTE_BYTES))
        if number < 0 or entry.parsed.key.sequence != sequence:
            raise Malformed("a header of another round, or of a peer without a number")
        if lead is None:
            lead = self._leads[sequence] = LedRound(self, sequence)
            self._start(lead.run())
        lead.check(entry)
        lead.readies.setdefault(sender, entry)
        lead.ratios.setdefault(sender, message.real("ratio") if message.has("ratio") else None)
        self.misses.pop(sender, None)
        self.membership.changed()
        return {"state": "waiting"}

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def over(self, lead: LedRound, half_ready_at: float | None) -> None:
        self._leads.pop(lead.sequence, None)
        if half_ready_at is not None and self._last_end is not None:
            self._usual.append(half_ready_at - self._last_end)
        self._last_end = time.monotonic()
        self.membership.changed()

    def noticed(self, sequence: int) -> None:
        """This worker has ended a round that another leads: should that one be lost, this one knows what is usual."""
        own = self.taking_part.rounds.get(sequence)
        if own is None or sequence in self._leads:
            return
        if self._last_end is not None:
            self._usual.append(max(0.0, own.started - self._last_end))
        self._last_end = time.monotonic()

    def leads(self, sequence: int) -> bool:
        return sequence in self._leads

    def in_progress(self) -> dict[int, str]:
        """For those who watch: what this node leads, and how far it is."""
        return {sequence: lead.phase for sequence, lead in self._leads.items()}

    @property
    def patience_seconds(self) -> float:
        usual = statistics.median(self._usual) if self._usual else time.monotonic() - (self._last_end or self._began)
        return max(_LEAST_PATIENCE * self.settings.lost_seconds, self.settings.patience * usual)

    async def earlier_round(self, sequence: int) -> None:
        """Rounds end in their order, also where several are on their way."""
        while any(other < sequence for other in self._leads):
            await self.membership.wait_for_change(_POLL_SECONDS)
