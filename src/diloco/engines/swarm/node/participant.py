"""One worker's way through its rounds: it posts, follows the plan of whoever leads, and ends with all or nothing.

    post      the header goes to the leader, again to the next one if that is lost
    plan      everyone in it exchanges parts (transfer.py) and tells the leader when all of the mean is here
    commit    the mean counts: not before the leader has heard that all who live have it
    missed    others have ended this round: the outcome is asked for; if this worker is in it, the mean is fetched and
              counts here too. If it is not, and most others have ended it, the round has failed for this worker (I6)
              and it must take their state; a single one that went on alone is not followed

A word of a leader counts only if no higher authority (plan.py) has spoken in this round.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from diloco.engines.rounds import RoundKey
from diloco.engines.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.engines.swarm.node import clock
from diloco.engines.swarm.node.membership import Membership
from diloco.engines.swarm.node.plan import Authority, Plan, authority_from
from diloco.engines.swarm.node.recent_rounds import KeptRounds
from diloco.engines.swarm.node.trainer import PostedRound, PresentWorker, RoundOutcome
from diloco.engines.swarm.node.transfer import Transfer, Trouble
from diloco.engines.swarm.node.wire import Malformed, Message, pack, read_frame_into, write_frame

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_SETTLE = (
    0.2  # times `lost_seconds`: a commit that others have heard of is on its way here too: wait so long before asking
)
_AGAIN_SECONDS = 2.0  # then the leader is asked whether it still leads
_NOBODY = Authority(0, -(1 << 30))


@dataclass(eq=False)
class Round:
    """What this worker knows of a round that it has posted."""

    posting: PostedRound
    started: float = field(default_factory=clock.now)
    authority: Authority = _NOBODY
    leader: str | None = None
    plan: Plan | None = None
    complete: Authority | None = None
    transfer: Transfer | None = None
    task: "asyncio.Task[None] | None" = None
    bytes_sent: int = 0
    bytes_received: int = 0
    ended: "asyncio.Future[RoundOutcome]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    planned: asyncio.Event = field(default_factory=asyncio.Event)
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def sequence(self) -> int:
        return self.posting.key.sequence

    def stop_transfer(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None
        if self.transfer is not None:
            self.transfer.close()
            self.bytes_sent += self.transfer.bytes_sent
            self.bytes_received += self.transfer.bytes_received
            self.transfer = None

    def end(self, how: RoundOutcome) -> None:
        self.stop_transfer()
        if not self.ended.done():
            self.ended.set_result(how)


class LeadsRounds(Protocol):
    """What is needed of leading.py."""

    async def told(self, sender: str, message: Message) -> bytes: ...

    def leads(self, sequence: int) -> bool: ...


class TakingPart:
    def __init__(self, membership: Membership, kept: KeptRounds) -> None:
        self.membership, self.kept = membership, kept
        self.transport, self.settings = membership.transport, membership.settings
        self.rounds: dict[int, Round] = {}
        self.lead: LeadsRounds | None = None
        """Set by the node: what leads rounds here."""
        self.on_settled: Callable[[Plan], None] = lambda _: None

    @property
    def stall_seconds(self) -> float:
        """Beats find dead and frozen peers; this is for a way between two that is broken although both live."""
        return 4 * self.settings.lost_seconds

    # Posting

    async def post(self, posting: PostedRound) -> RoundOutcome:
        """To the end of the round, whatever that is."""
        round_ = self.rounds[posting.key.sequence] = Round(posting)
        self.membership.status.next = max(self.membership.status.next, round_.sequence)
        try:
            async with asyncio.timeout(posting.deadline_seconds):
                while not round_.ended.done():
                    if self.membership.out is not None:
                        round_.end(_failed(round_, self.membership.out, fatal=True))
                        break
                    await self._announce(round_)
                    await self._watch(round_)
        except TimeoutError:
            if ahead := self._who_ended(round_.sequence):
                await self.missed(round_, ahead)
            round_.end(_failed(round_, f"no result within {posting.deadline_seconds:g} s"))
        finally:
            round_.stop_transfer()
            self.rounds.pop(round_.sequence, None)
        how = round_.ended.result()
        self.membership.status.next = max(self.membership.status.next, round_.sequence + 1)
        return how

    async def _announce(self, round_: Round) -> None:
        """Tell the leader that this worker is ready."""
        leader = round_.leader or self.membership.leader()
        round_.leader = None
        if leader is None:
            await self.membership.wait_for_change(_POLL_SECONDS)
            return
        posting = round_.posting
        message = pack(
            "ready",
            sequence=round_.sequence,
            fragment=posting.key.fragment,
            header=posting.header,
            note=posting.note,
            ratio=posting.max_norm_ratio,
        )
        try:
            answer = await self.tell(leader, message)
        except Unreachable as problem:
            self.membership.suspect(leader, problem)
            await self.membership.wait_for_change(_POLL_SECONDS)
            return
        except CallRefused as reason:
            if not str(reason).startswith(("unknown", "busy")):  # else it does not know us yet, and soon will
                round_.end(_failed(round_, str(reason), fatal=True))
            self.membership.beat_soon(leader)
            await self.membership.wait_for_change(_POLL_SECONDS)
            return
        match answer.text("state"):
            case "waiting":
                round_.leader = leader
            case "ended":
                await self.missed(round_, leader)
                await self.membership.wait_for_change(_POLL_SECONDS)
            case _:  # it does not think that it leads; views settle within a beat
                self.membership.beat_soon(leader)
                await self.membership.wait_for_change(_POLL_SECONDS)

    async def _watch(self, round_: Round) -> None:
        """Until the round has ended, or its leader is no more."""
        others_ended: float | None = None
        again = clock.now() + _AGAIN_SECONDS
        while not round_.ended.done() and round_.leader is not None and clock.now() < again:
            await asyncio.wait({round_.ended}, timeout=_POLL_SECONDS)
            if round_.leader is not None and not self.membership.is_live(round_.leader):
                round_.leader = None
            ahead = self._who_ended(round_.sequence)
            if ahead is not None and not round_.ended.done():
                others_ended = others_ended or clock.now()
                if clock.now() - others_ended > _SETTLE * self.settings.lost_seconds:
                    await self.missed(round_, ahead)

    def _who_ended(self, sequence: int) -> str | None:
        return next((peer.name for peer in self.membership.live() if peer.status.ended >= sequence), None)

    async def tell(self, peer: str, data: bytes) -> Message:
        """A call to another node, or to this one."""
        if peer == self.transport.peer:
            assert self.lead is not None
            return Message.unpack(await self.lead.told(peer, Message.unpack(data)))
        return Message.unpack(await self.transport.call(peer, data, self.settings.lost_seconds))

    # What leaders say

    def heard_from_leader(self, sender: str, message: Message) -> dict[str, object]:
        """plan, commit, inquire: what it says, if it may speak in this round."""
        sequence = message.number("sequence")
        if self.kept.has(sequence) or sequence <= self.membership.status.ended:
            return {"state": "ok" if message.kind == "commit" else "ended"}
        round_ = self.rounds.get(sequence)
        if round_ is None:
            return {"state": "none"}
        authority = authority_from(message.items("authority"))
        if -authority.minus_number != self.membership.number_of(sender):
            raise CallRefused("an authority that is another's")
        if authority.leader < round_.authority.leader or (message.kind == "plan" and authority < round_.authority):
            if message.kind == "inquire" and round_.leader is not None and self.membership.is_live(round_.leader):
                return {"state": "led", "leader": round_.leader}
            return {"state": "superseded"}
        if message.kind == "plan":
            self._planned(round_, sender, Plan.from_wire(message))
        elif message.kind == "commit":
            self._committed(round_, sender, authority)
        else:
            return self._inquired(round_, authority)
        return {"state": "ok"}

    def _planned(self, round_: Round, sender: str, plan: Plan) -> None:
        mine = plan.entry(self.transport.peer)
        if plan.leader != sender:
            raise CallRefused("a plan in another's name")
        if mine is None or mine.header != round_.posting.header or mine.number != self.membership.status.number:
            raise CallRefused("a plan without this worker as it is")
        if plan.max_norm_ratio != round_.posting.max_norm_ratio or plan.key != round_.posting.key:
            raise CallRefused("a plan with other rules")
        if {entry.parsed.layout_digest for entry in plan.entries} != {mine.parsed.layout_digest}:
            raise CallRefused("a plan with a worker that trains something else")
        round_.stop_transfer()
        round_.authority, round_.leader, round_.plan, round_.complete = plan.authority, sender, plan, None
        if plan.has_mean:
            round_.transfer = Transfer(plan, round_.posting, self.transport, self.stall_seconds)
        round_.task = asyncio.create_task(self._follow(round_, plan))
        round_.planned.set()

    def _committed(self, round_: Round, sender: str, authority: Authority) -> None:
        if round_.plan is not None and round_.complete == authority:
            self.settle(round_, round_.plan)
            return
        task = asyncio.create_task(self.missed(round_, sender))  # a new leader has found that somebody has it already
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _inquired(self, round_: Round, authority: Authority) -> dict[str, object]:
        """A new leader asks what there is of a round. From here on older ones are not heeded."""
        posting = round_.posting
        answer: dict[str, object] = {"state": "posted", "header": posting.header, "note": posting.note}
        if round_.complete is not None and round_.plan is not None:
            answer["plan"] = round_.plan.to_wire()
        round_.authority = authority
        return answer

    async def _follow(self, round_: Round, plan: Plan) -> None:
        fields: dict[str, object] = {"sequence": round_.sequence, "authority": list(plan.authority)}
        try:
            if round_.transfer is not None:
                await round_.transfer.run()
            round_.complete = plan.authority
            message = pack("complete", **fields)
        except Trouble as trouble:
            logger.info("round %d: trouble with %s: %s", round_.sequence, trouble.peer, trouble)
            if not trouble.lie:
                self.membership.beat_soon(trouble.peer)
            message = pack("trouble", peer=trouble.peer, reason=str(trouble)[:200], lie=trouble.lie, **fields)
        while not round_.ended.done():  # or until another plan puts an end to this one
            try:
                await self.tell(plan.leader, message)
                return
            except CallRefused as problem:
                logger.info("round %d: its leader does not listen: %s", round_.sequence, problem)
                return
            except Unreachable as problem:
                self.membership.suspect(plan.leader, problem)
                await asyncio.sleep(_POLL_SECONDS)

    # The end of a round

    def settle(self, round_: Round, plan: Plan) -> None:
        """The mean counts."""
        round_.stop_transfer()
        posting, decision = round_.posting, plan.decision
        me = self.membership.status.number
        self.kept.keep(plan, bytes(posting.mean.view) if plan.has_mean else b"")
        status = self.membership.status
        status.ended = max(status.ended, round_.sequence)
        if me in decision.contributors:
            status.contributed = round_.sequence
        failure = None
        if not decision.contributors and decision.refused:
            failure = f"round {round_.sequence}: every contribution was refused: {decision.refused}"
        astray = decision.resync and me in decision.refused
        if astray:
            status.holds, self.kept.held = False, None
        elif status.holds:  # else the trainer lacks an earlier round, and this one's mean is of no use to it yet
            self.kept.held = round_.sequence + 1
        self.on_settled(plan)
        round_.end(
            RoundOutcome(
                posting.key,
                failure=failure,
                resync=astray if failure is None else decision.resync,
                contributors=decision.contributors,
                refused=decision.refused,
                total_weight=decision.total_weight,
                present=tuple(PresentWorker(e.number, e.header, e.note) for e in plan.entries),
                roster=plan.roster,
                bytes_sent=round_.bytes_sent,
                bytes_received=round_.bytes_received,
                seconds=clock.now() - round_.started,
            )
        )
        self.membership.changed()

    def passed_by(self, sequence: int) -> None:
        """A round has ended without this worker, which has not posted it: it does not have the state any more."""
        status = self.membership.status
        status.ended, status.holds = max(status.ended, sequence), False
        self.membership.changed()

    async def missed(self, round_: Round, peer: str) -> None:
        """Others have ended this round: with this worker in it, or without."""
        try:
            answer = await self.tell(peer, pack("outcome", sequence=round_.sequence))
            if answer.text("state") == "kept":
                plan = Plan.from_wire(answer.map("plan"))
                mine = plan.entry(self.transport.peer)
                if mine is not None and mine.header == round_.posting.header:
                    async with round_.fetching:
                        if not round_.ended.done():
                            await self._fetch_mean(round_, plan, peer)
                            self.settle(round_, plan)
                    return
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("round %d: its outcome cannot be had from %s: %s", round_.sequence, peer, problem)
            if isinstance(problem, Unreachable):
                self.membership.suspect(peer, problem)
                await asyncio.sleep(_POLL_SECONDS)
                return
        if not round_.ended.done() and self.membership.most_ended(round_.sequence):
            self.membership.status.holds = False
            round_.end(_failed(round_, "the others ended it without this worker", resync=True))

    async def _fetch_mean(self, round_: Round, plan: Plan, peer: str) -> None:
        if not plan.has_mean or round_.complete == plan.authority:
            return
        round_.stop_transfer()
        data = await self.fetch_kept(round_.sequence, peer)
        if len(data) != round_.posting.mean.num_bytes:
            raise Malformed(f"a mean of {len(data)} bytes instead of {round_.posting.mean.num_bytes}")
        round_.posting.mean.view[:] = data
        round_.bytes_received += len(data)

    async def fetch_kept(self, sequence: int, peer: str) -> bytes:
        """The mean of a round that has ended, from somebody who keeps it."""
        stream = await self.transport.open_stream(peer, self.stall_seconds)
        try:
            await write_frame(stream, pack("mean", sequence=sequence), self.stall_seconds)
            size = int.from_bytes(await stream.read(8, self.stall_seconds), "little")
            if size > self.kept.largest:
                raise Malformed(f"a mean of {size} bytes")
            data = bytearray(size)
            view, got = memoryview(data), 0
            while got < size:
                got += await read_frame_into(stream, view[got:], self.stall_seconds)
            await stream.write(b"\1", self.stall_seconds)
            return bytes(data)
        finally:
            stream.close()

    # Streams of others

    async def serve_parts(self, stream: Stream, message: Message) -> None:
        """Parts may come before the plan they belong to."""
        authority, sequence = authority_from(message.items("authority")), message.number("sequence")
        end = clock.now() + self.settings.lost_seconds
        while clock.now() < end:
            round_ = self.rounds.get(sequence)
            if round_ is not None and round_.transfer is not None and round_.authority == authority:
                if round_.plan is not None and round_.plan.entry(stream.peer) is not None:
                    await round_.transfer.serve(stream)
                return
            if round_ is None or round_.authority > authority:
                return
            round_.planned.clear()
            try:
                async with asyncio.timeout(_POLL_SECONDS):
                    await round_.planned.wait()
            except TimeoutError:
                continue


def _failed(round_: Round, reason: str, *, resync: bool = False, fatal: bool = False) -> RoundOutcome:
    key: RoundKey = round_.posting.key
    return RoundOutcome(
        key,
        failure=f"round {key.sequence}: {reason}",
        resync=resync,
        fatal=fatal,
        bytes_sent=round_.bytes_sent,
        bytes_received=round_.bytes_received,
        seconds=clock.now() - round_.started,
    )
