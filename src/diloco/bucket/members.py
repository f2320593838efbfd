"""The workers of a run in a bucket: their numbers, how far they are, which are alive, and what time the store has."""

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco.atomic_files import replace_file
from diloco.bucket import rules
from diloco.bucket.records import MAX_WORKERS, Malformed, MemberClaim, WorkerBeat, decode, encode, number_in
from diloco.bucket.settings import BucketSettings
from diloco.bucket.store import Store, Stored
from diloco.errors import EngineError
from diloco.swarm.protocol.status import MemberStatus, RunStatus, Status

logger = logging.getLogger(__name__)

Emit = Callable[[str, Mapping[str, Any]], None]


class BucketMembers:
    """This worker's status, and the others' as their latest beats tell them."""

    def __init__(self, settings: BucketSettings, emit: Emit, clock: Callable[[], float]) -> None:
        """`clock`: this machine's, of whatever beginning."""
        self._settings = settings
        self._emit = emit
        self._clock = clock
        self._clock_offset = 0.0
        self._told_live: set[int] = set()
        self.status = Status(label=settings.label[:64])
        self.first_round = 0
        """The first round of this worker since it has the run's state."""
        self.others: dict[int, rules.KnownMember] = {}

    @property
    def own(self) -> int:
        return self.status.number

    async def take_number(self, store: Store) -> None:
        """Take the number that this worker had, by the file in its folder, or the lowest free one."""
        path = self._settings.folder / f"{self._settings.name}.json"
        if path.exists() and (number := await self._former_number(store, path)) is not None:
            self.status.number = number
            return
        worker = secrets.token_hex(8)
        claim = encode(MemberClaim(worker, self._settings.label[:64]))
        taken = {number_in(each.name) for each in await store.list("members/")}
        while (number := rules.next_number(taken)) is not None:
            if await store.create(f"members/{number}", claim):
                path.parent.mkdir(parents=True, exist_ok=True)
                with replace_file(path) as file:
                    file.write(json.dumps({"number": number, "worker": worker, "bucket": self._settings.url}).encode())
                self.status.number = number
                return
            taken.add(number)
        raise EngineError(f"the bucket has {MAX_WORKERS} workers, which is the most: use another run")

    async def _former_number(self, store: Store, path: Path) -> int | None:
        """The number in this worker's file; None if the bucket knows nothing of it: it is of another run."""
        try:
            saved = json.loads(path.read_text())
            number, worker = int(saved["number"]), saved["worker"]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise EngineError(f"{path} has not this worker's number in the bucket: remove it ({problem!r})") from None
        claim = await store.read(f"members/{number}")
        try:
            is_own = claim is not None and decode(claim, MemberClaim).worker == worker
        except Malformed:
            return None
        return number if is_own else None

    # Time

    def now(self) -> float:
        """The store's time, as this worker's own objects have told it."""
        return self._clock() + self._clock_offset

    def learn_time(self, stored: Stored, before: float, after: float) -> None:
        """An object of this worker was written between two moments of this machine's clock."""
        self._clock_offset = stored.modified - 0.5 * (before + after)

    # Beats

    async def beat(self, store: Store, *, left: bool = False) -> None:
        """Tell the others how far this worker is, and hear how far they are."""
        before = self._clock()
        beat = WorkerBeat(self.status, self._settings.lost_seconds, self.first_round, left)
        await store.put(f"beats/{self.own}", encode(beat))
        after = self._clock()
        if not left:
            await self.listen(store, (before, after))

    async def listen(self, store: Store, written: tuple[float, float] | None = None) -> None:
        """Hear how far the others are. `written`: the moments between which this worker's beat was written."""
        for stored in await store.list("beats/"):
            number = number_in(stored.name)
            if number == self.own and written is not None:
                self.learn_time(stored, *written)
            elif number is not None and number != self.own:
                known = self.others.get(number)
                if known is None or known.modified != stored.modified:
                    await self._hear(store, number, stored)
        self._tell_changes()

    async def _hear(self, store: Store, number: int, stored: Stored) -> None:
        content = await store.read(stored.name)
        if content is None:
            return
        try:
            beat = decode(content, WorkerBeat)
            if beat.status.number != number:
                raise Malformed(f"it is of worker {beat.status.number}")
        except Malformed as problem:
            logger.warning("the beat of worker %d is passed over: %s", number, problem)
            return
        self.others[number] = rules.KnownMember(beat, stored.modified)

    def _tell_changes(self) -> None:
        now = self.now()
        live = {number for number, member in self.others.items() if member.is_live(now)}
        for number in sorted(live - self._told_live):
            self._tell("member_joined", number)
        for number in sorted(self._told_live - live):
            member = self.others[number]
            if member.beat.left:
                self._tell("member_left", number)
            else:
                self._tell("member_lost", number, reason=f"no sign of life for {now - member.modified:.0f} s")
        self._told_live = live

    def _tell(self, type_: str, number: int, **more: Any) -> None:
        label = self.others[number].beat.status.label
        self._emit(type_, {"peer": f"worker-{number}", "number": number, "label": label, **more})

    def run_status(self) -> RunStatus:
        """The run as this worker knows it."""
        own = MemberStatus(**_fields(self.status))
        return self._with_others([own], self.now())

    def others_status(self) -> RunStatus:
        """The run as its bucket tells it to a machine that is no worker: no beat is of the future."""
        latest = max((member.modified for member in self.others.values()), default=0.0)
        return self._with_others([], max(self.now(), latest))

    def _with_others(self, own: list[MemberStatus], now: float) -> RunStatus:
        others = [
            MemberStatus(
                **_fields(member.beat.status),
                live=member.is_live(now),
                left=member.beat.left,
                silent_seconds=round(max(0.0, now - member.modified), 2),
            )
            for member in list(self.others.values())  # this may be another thread
        ]
        members = tuple(sorted([*own, *others], key=lambda member: member.number))
        return RunStatus(run=self._settings.url[:512], members=members, leader=None, leading={}, banned={})


def _fields(status: Status) -> dict[str, Any]:
    return {name: getattr(status, name) for name in Status.__struct_fields__}
