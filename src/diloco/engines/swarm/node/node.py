"""One worker's node: everything it says and hears in the swarm, in one event loop, beside its trainer.

    membership.py   who is here            leading.py      rounds that this node leads
    taking_part.py  this worker's rounds   states.py       the global state for joiners
    trust.py        who may say anything   sharing.py      files for joiners

Every call and stream of others comes in here, and is asked for its credential before it is looked at.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.engines.swarm.network.known_peers import KnownPeer, PeersFile
from diloco.engines.swarm.network.transport import CallRefused, Stream, Transport, Unreachable
from diloco.engines.swarm.node import clock
from diloco.engines.swarm.node.file_transfer import SharedFiles, fetch_file
from diloco.engines.swarm.node.joining import join, remember
from diloco.engines.swarm.node.leader import Leading
from diloco.engines.swarm.node.membership import Membership
from diloco.engines.swarm.node.participant import TakingPart
from diloco.engines.swarm.node.plan import Plan
from diloco.engines.swarm.node.recent_rounds import KeptRounds
from diloco.engines.swarm.node.state_transfer import States
from diloco.engines.swarm.node.status import Status
from diloco.engines.swarm.node.trainer import FetchedState, PostedRound, RoundOutcome, Trainer
from diloco.engines.swarm.node.wire import PROTOCOL, Malformed, Message, pack, read_frame
from diloco.engines.swarm.run_files import PEERS_FILE, REVOCATIONS_FILE
from diloco.engines.swarm.settings import Settings
from diloco.engines.swarm.trust.credential import PeerRefused
from diloco.engines.swarm.trust.permissions import Permissions
from diloco.version import __version__

logger = logging.getLogger(__name__)

_LEADING = ("ready", "complete", "trouble")
_LED = ("plan", "commit", "inquire")
_CARE_SECONDS = 1.0
_LONGEST_HELLO = 8192
_MOST_MEASURED = 512 << 10
_FAREWELL_SECONDS = 2.0
_SAVE_SECONDS = 1.0


class Node:
    def __init__(self, transport: Transport, permissions: Permissions, settings: Settings, trainer: Trainer) -> None:
        self.transport, self.permissions, self.settings, self._trainer = transport, permissions, settings, trainer
        self.own = Status(label=settings.label)
        self.membership = Membership(transport, permissions, settings, self.own)
        self.membership.on_event = self._happened
        self.taking_part = TakingPart(self.membership, KeptRounds())
        self.taking_part.on_settled = self._settled
        self.leading = Leading(self.membership, self.taking_part, self._call_slow)
        self.taking_part.lead = self.leading
        self.states = States(self.membership, self.taking_part, trainer)
        self.files = SharedFiles()
        self._peers_file = PeersFile(settings.path(PEERS_FILE))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._alone = False
        self._astray_since: float | None = None

    # What the trainer asks

    @property
    def number(self) -> int:
        return self.own.number

    async def start(self) -> None:
        """Found the swarm, or join it; raises EngineError with what to do."""
        await self.transport.serve(self._on_call, self._on_stream)
        self.membership.addresses = await self.transport.addresses()
        self.permissions.load_revocations(self.settings.path(REVOCATIONS_FILE))
        await join(self.membership, self.settings)
        self._keep(self.membership.keep_beating())
        self._keep(self._take_care())
        await self._peers_file.save(self._known_peers(), self.settings.lost_seconds)

    async def post(self, posting: PostedRound) -> RoundOutcome:
        return await self.taking_part.post(posting)

    async def fetch_state(self) -> FetchedState | None:
        return await self.states.fetch()

    def progress(self, **values: float) -> None:
        """What beats tell of this worker: inner_steps, tokens, loss, step_seconds."""
        self.own.position = int(values.get("inner_steps", self.own.position))
        self.own.tokens = int(values.get("tokens", self.own.tokens))
        self.own.step_seconds = float(values.get("step_seconds", self.own.step_seconds))
        loss = float(values.get("loss", self.own.loss))
        self.own.loss = loss if -1e30 < loss < 1e30 else -1.0

    def serve_files(self, files: Mapping[str, Path]) -> None:
        self.files.serve(files)

    async def fetch_file(self, name: str, path: Path) -> None:
        """From any member that has it."""
        peers = [peer.name for peer in self.membership.live()]
        await fetch_file(self.transport, peers, name, path, self.taking_part.stall_seconds)

    async def leave(self) -> None:
        """Rounds in flight have ended or are given up; the others are told."""
        await self.membership.say_goodbye(_FAREWELL_SECONDS)
        for task in self._tasks:
            task.cancel()
        await self.transport.close()
        await self._peers_file.save(self._known_peers(), _SAVE_SECONDS)

    def members(self) -> tuple[int, ...]:
        return self.membership.roster()

    def status(self) -> dict[str, Any]:
        """For the display and for `diloco status`."""
        now = clock.now()
        others = [
            {
                **peer.status.to_wire(),
                "peer": peer.name,
                "live": peer.live,
                "left": peer.left,
                "silent_seconds": round(now - peer.heard, 2),
                "latency_seconds": round(peer.latency_seconds, 4),
                "addresses": peer.addresses,
            }
            for peer in self.membership.peers.values()
        ]
        me = {
            **self.own.to_wire(),
            "peer": self.transport.peer,
            "live": True,
            "left": False,
            "silent_seconds": 0.0,
            "latency_seconds": 0.0,
            "addresses": self.membership.addresses,
        }
        return {
            "run": self.permissions.run_id,
            "members": sorted([me, *others], key=lambda member: (member["number"] < 0, member["number"])),
            "leader": self.membership.leader(),
            "leading": {str(sequence): phase for sequence, phase in self.leading.in_progress().items()},
            "banned": self.permissions.bans(),
        }

    # Care

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_care(self) -> None:
        while True:
            await asyncio.sleep(_CARE_SECONDS)
            if self.permissions.load_revocations(self.settings.path(REVOCATIONS_FILE)):
                self.membership.expel()
            self.membership.addresses = await self.transport.addresses()
            self._notice_rounds_missed()
            self._notice_being_astray()
            self._notice_being_alone()
            self._peers_file.save_if_due(self._known_peers())

    def _notice_rounds_missed(self) -> None:
        """Others have ended a round that this worker has not even posted: it must hurry, fail, and catch up."""
        missed = self.own.next not in self.taking_part.rounds and self.membership.most_ended(self.own.next)
        if self.own.holds and missed:
            self.own.holds = False
            self._trainer.post_now(self.own.next)

    def _notice_being_astray(self) -> None:
        """Most others are behind, and were not in what this worker ended last: it was cut off and went on alone.

        Whoever has not been in any round yet says nothing about that, however many of them join at once.
        """
        last = self.taking_part.kept.get(self.own.ended)
        known = [p for p in self.membership.live() if p.status.holds and p.status.contributed >= 0]
        behind = [p for p in known if p.status.ended < self.own.ended]
        others = [p for p in behind if last is None or last.plan.entry(p.name) is None]
        if not self.own.holds or 2 * len(others) <= 1 + len(known):
            self._astray_since = None
            return
        self._astray_since = self._astray_since or clock.now()
        if clock.now() - self._astray_since > self.settings.lost_seconds:
            self.own.holds, self.own.ended, self.taking_part.kept.held = False, others[0].status.ended, None
            self._happened("astray", {"number": self.number})
            self._trainer.post_now(self.own.next)

    def _notice_being_alone(self) -> None:
        alone = not self.membership.live()
        if alone and not self._alone and len(self.membership.numbers) > 1:
            self._happened("alone", {"number": self.number})
            logger.warning("nobody else is here: this worker trains alone until somebody comes (back)")
        self._alone = alone

    def _known_peers(self) -> list[KnownPeer]:
        now, heard_now = time.time(), clock.now()
        known = [
            KnownPeer(
                peer.name,
                peer.status.number if peer.status.number >= 0 else None,
                tuple(peer.addresses),
                self.permissions.invitation_of(peer.name),
                now - (heard_now - peer.heard),
            )
            for peer in self.membership.peers.values()
            if peer.heard
        ]
        me = KnownPeer(
            self.transport.peer,
            self.number if self.number >= 0 else None,
            tuple(self.membership.addresses),
            self.permissions.invitation_of(self.transport.peer),
            now,
            self.settings.name,
        )
        return [me, *known]

    def _happened(self, type_: str, fields: dict[str, object]) -> None:
        logger.info("%s %s", type_, fields)
        self._trainer.emit(type_, fields)

    def _call_slow(self, peer: str, sequence: int) -> None:
        if peer == self.transport.peer:
            self._trainer.post_now(sequence)
            return

        async def call() -> None:
            try:
                await self.transport.call(peer, pack("called", sequence=sequence), self.settings.lost_seconds)
            except (Unreachable, CallRefused) as problem:
                logger.info("%s could not be called to round %d: %s", peer, sequence, problem)

        self._keep(call())

    def _settled(self, plan: Plan) -> None:
        """Every member counts offences from the same plans, and so bans the same peers."""
        self.leading.noticed(plan.key.sequence)
        names = {self.membership.number_of(name): name for name in self.membership.peers}
        strays = {e.number for e in plan.entries if "is not the others'" in plan.decision.refused.get(e.number, "")}
        for number, reason in plan.decision.refused.items():
            name = names.get(number)
            if name is None or number in strays or not plan.contributors:  # all at once is no one's offence
                continue
            if self.permissions.record_offence(name, reason):
                self._happened("member_banned", {"peer": name, "number": number, "reason": reason})
                self.membership.expel()
                remember(self.membership, self.settings)
        for entry in plan.contributors:
            self.permissions.record_accepted(entry.peer)

    # What others say

    async def _on_call(self, peer: str, data: bytes) -> bytes:
        stranger: PeerRefused | None = None
        try:
            self.permissions.check(peer)
        except PeerRefused as reason:
            stranger = reason
        if stranger is not None and (stranger.kind != "unknown" or len(data) > _LONGEST_HELLO):
            raise CallRefused(str(stranger))
        try:
            message = Message.unpack(data)
            if message.kind == "hello":
                return pack("hello", **self._hello(peer, message))
            if stranger is not None:
                raise stranger
            return await self._answer(peer, message)
        except PeerRefused as reason:
            raise CallRefused(str(reason)) from None
        except Malformed as problem:
            if self.permissions.record_offence(peer, f"malformed: {problem}"):
                self.membership.expel()
            raise CallRefused(f"malformed: {problem}") from None

    def _hello(self, peer: str, message: Message) -> dict[str, object]:
        if message.number("protocol") != PROTOCOL:
            raise CallRefused(
                f"this swarm speaks protocol {PROTOCOL} (diloco {__version__}), you speak "
                f"{message.number('protocol')} (diloco {message.text('version')}): install the same version"
            )
        answer = self.membership.greeted(peer, message)
        return answer | {"run": self.permissions.run_id}

    async def _answer(self, peer: str, message: Message) -> bytes:
        """Of whoever has a credential; rounds are for members only."""
        match message.kind:
            case "status":
                return pack("status", **self.status())
            case "files":
                return pack("files", names=self.files.names())
            case "clock":
                return pack("clock", time=time.time())
            case "measure":  # for `diloco doctor`: how fast bytes go there and back
                return pack("measure", data=bytes(message.number("bytes", high=_MOST_MEASURED)))
        if peer not in self.membership.peers:
            raise CallRefused("say hello first")
        match message.kind:
            case "beat":
                return pack("beat", **self.membership.beaten(peer, message))
            case "number":
                number = self.membership.number_for(peer, message.number("wished", low=-1))
                return pack("number", number=number)
            case "bye":
                self.membership.farewell(peer)
                return pack("answer", state="heard")
            case "outcome":
                return pack("answer", **self.states.outcome(message))
            case "called":
                sequence = message.number("sequence")
                if peer == self.membership.leader() and sequence <= self.own.next:
                    self._trainer.post_now(sequence)
                return pack("answer", state="heard")
            case kind if kind in _LEADING:
                return await self.leading.told(peer, message)
            case kind if kind in _LED:
                return pack("answer", **self.taking_part.heard_from_leader(peer, message))
        raise Malformed(f"'{message.kind}' is nothing that can be asked")

    async def _on_stream(self, stream: Stream) -> None:
        try:
            self.permissions.check(stream.peer)
            message = Message.unpack(await read_frame(stream, 4096, self.settings.lost_seconds))
            if message.kind == "file":
                await self.files.give(stream, message, self.taking_part.stall_seconds)
            elif stream.peer not in self.membership.peers:
                return
            elif message.kind == "parts":
                await self.taking_part.serve_parts(stream, message)
            elif message.kind == "mean":
                await self.states.serve_mean(stream, message)
            elif message.kind == "state":
                await self.states.serve(stream)
        except (PeerRefused, Malformed, Unreachable) as problem:
            logger.info("a stream of %s ended: %s", stream.peer, problem)
