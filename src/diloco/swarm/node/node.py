"""One worker's node: all that it sends and receives in the swarm, in one event loop, beside its trainer.

The life of a round: what is decided (protocol/), and what carries it out (in this folder).

    1. The trainer posts its contribution (Node.post). The header goes to the leader: Ready
                                                                   protocol/round.py, participant.py
    2. The leader is the live member with the lowest number that has the state          protocol/membership.py
    3. It first asks all members whether an earlier leader has begun the round: Inquire
                                                                   protocol/leading.py, leader.py
    4. It waits until all are ready; if most are and patience is over, it asks the slow ones to post now: PostNow
                                                                   protocol/leading.py, leader.py
    5. It sends a Plan with all headers. From these every worker makes the same decision        protocol/plan.py
    6. The workers send encoded parts to the reducers of the plan, and get the means back       transfer.py
    7. Each tells the leader that it has the whole mean and signs its digest (Complete), or what went wrong (Trouble);
       a worker that died, froze or lied is left out of the next plan
                                                                   participant.py, protocol/troubles.py
    8. When all live workers have the mean, the leader sends Commit with their signatures, and the mean counts
                                                                   leader.py, protocol/certificate.py
    9. Each keeps the last means. A worker that missed the Commit fetches the mean; one that is not in the plan has
       failed the round, and fetches the others' state             outcomes.py, state_transfer.py

What serves only against workers that lie is asked through the hooks of audit.py, and lies in audit/.
Heartbeats (heartbeats.py) tell which members are live. Every call and stream of a peer comes in here, and the peer's
credential is checked before anything else.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from diloco.swarm import timing
from diloco.swarm.network.identity import load_seed
from diloco.swarm.network.known_peers import KnownPeer, PeersFile, read_peers
from diloco.swarm.network.limits import PeerRateLimit
from diloco.swarm.network.transport import CallRefused, Stream, Transport, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.audit import Audit, AuditedNode
from diloco.swarm.node.calls import Calls, addressed, name_process, open_addressed
from diloco.swarm.node.file_transfer import SharedFiles, fetch_file
from diloco.swarm.node.frames import read_frame
from diloco.swarm.node.heartbeats import Heartbeats
from diloco.swarm.node.joining import join, look_for_others, settle_number
from diloco.swarm.node.leader import Leader
from diloco.swarm.node.members import Members
from diloco.swarm.node.outcomes import Outcomes
from diloco.swarm.node.own_checks import OwnChecks
from diloco.swarm.node.participant import Participant
from diloco.swarm.node.state_transfer import SharedSnapshot, StateTransfer
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.certificate import Agreed, Notary
from diloco.swarm.protocol.joining import give_number
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.quorum import Quorum
from diloco.swarm.protocol.status import MemberStatus, OwnStatus, RunStatus
from diloco.swarm.protocol.wire import PROTOCOL, Malformed, PeerMessage, encode
from diloco.swarm.run_files import PEERS_FILE, REVOCATIONS_FILE
from diloco.swarm.settings import Settings
from diloco.swarm.trainer import FetchedState, PostedRound, RoundOutcome, Trainer
from diloco.swarm.trust.credential import PeerRefused
from diloco.swarm.trust.permissions import MAX_PEERS, Permissions
from diloco.swarm.trust.run_owner import refresh_invitation
from diloco.version import __version__

logger = logging.getLogger(__name__)

CALLS_AT_ONCE, CALLS_PER_SECOND = 256.0, 64.0
"""Calls of one peer. An honest one makes a few a second, and some more when rounds are short or many are lost."""
_MAX_HELLO_BYTES = 8192


class Node:
    def __init__(
        self,
        transport: Transport,
        permissions: Permissions,
        settings: Settings,
        trainer: Trainer,
        audit: Callable[[AuditedNode], Audit],
    ) -> None:
        """`audit`: the class of its audit; a run's is `Auditor` (audit/auditor.py)."""
        self.transport = transport
        self.permissions = permissions
        self.settings = settings
        self._trainer = trainer
        self.own = OwnStatus(label=settings.label, process=name_process())
        self.members = Members(transport, permissions, settings, self.own)
        self.members.on_event = self._emit
        self.heartbeats = Heartbeats(self.members)
        calls = Calls(self.members, self._answer)
        notary = Notary(permissions.run_id, transport.peer, load_seed(settings.path(f"{settings.name}.key")))
        notary.is_invited = permissions.has_seat
        quorum = Quorum(self.members)
        snapshot = SharedSnapshot(trainer)
        self.audit = audit(AuditedNode(self.members, calls, notary, quorum, snapshot.take))
        self.outcomes = Outcomes(self.heartbeats, calls, notary, quorum, self.audit)
        self.outcomes.on_end = self._on_round_end
        self.participant = Participant(self.outcomes)
        self.leader = Leader(self.participant, self._hurry)
        self.states = StateTransfer(self.outcomes, trainer, snapshot)
        self.files = SharedFiles()
        self._own_checks = OwnChecks(self.participant, trainer, self._emit)
        self._peers_file = PeersFile(
            settings.path(PEERS_FILE), lambda: refresh_invitation(Path(settings.folder), settings.name)
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls_of = PeerRateLimit(CALLS_AT_ONCE, CALLS_PER_SECOND, MAX_PEERS)

    # For the trainer

    @property
    def number(self) -> int:
        return self.own.number

    async def start(self) -> None:
        """Found the swarm, or join it; raises EngineError with what to do."""
        faults = self.members.faults
        await self.transport.serve(faults.answering(self._on_call), faults.serving(self._on_stream))
        self.members.addresses = tuple(await self.transport.addresses())
        self.permissions.load_revocations(self.settings.path(REVOCATIONS_FILE))
        self.permissions.reserve_seats(read_peers(self.settings.path(PEERS_FILE)))
        await join(self.heartbeats)
        self._start_task(self.heartbeats.run())
        self._start_task(self._check_regularly())
        self._start_task(look_for_others(self.heartbeats))
        await self._peers_file.save(self._known_peers(), self.settings.lost_seconds)

    async def post(self, posted: PostedRound) -> RoundOutcome:
        return await self.participant.post(posted)

    async def fetch_state(self, most_bytes: int | None = None) -> FetchedState | None:
        """Fetch the others' state, as StateTransfer.fetch. `most_bytes`: a larger state cannot be of this run."""
        self.states.most_bytes = most_bytes or self.states.most_bytes
        return await self.states.fetch()

    def progress(self, **values: float) -> None:
        """Take what this worker's heartbeats tell: inner_steps, tokens, loss, step_seconds, run_tokens."""
        self.own.report(values)

    def serve_files(self, files: Mapping[str, Path]) -> None:
        self.files.serve(files)

    async def fetch_file(self, name: str, path: Path) -> None:
        """Fetch a file from any member that has it."""
        peers = [peer.name for peer in self.members.live()]
        await fetch_file(self.transport, peers, name, path, self.settings.stall_seconds)

    async def leave(self) -> None:
        """Say goodbye to the others, and end. The trainer has ended or given up its rounds."""
        await self.heartbeats.say_goodbye(timing.GOODBYE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await self.transport.close()
        await self._peers_file.save(self._known_peers(), timing.SAVE_SECONDS)

    # Tasks

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.members.faults.start(work, "a task of its node")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _withdraw(self) -> None:
        """This node is out of the run: calls to its identity must reach a process that has taken its place."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        await self.transport.close()

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(timing.CHECK_SECONDS)
            try:
                await self._check()
            except OSError as problem:  # too many open files, a full disk: that passes
                self.members.faults.record("its regular checks", problem)

    async def _check(self) -> None:
        if self.permissions.load_revocations(self.settings.path(REVOCATIONS_FILE)):
            self.members.expel()
        self.members.drop_unknown()
        self.states.release_held()
        self.members.addresses = tuple(await self.transport.addresses())
        if not self.participant.rounds:  # in a round, its leader says so
            await settle_number(self.heartbeats)
        self._own_checks.run()
        self._peers_file.save_if_due(self._known_peers())

    def _known_peers(self) -> list[KnownPeer]:
        """Return the content of peers.json."""
        since_1970 = time.time() - clock.now()
        known = [
            KnownPeer(
                peer.name,
                peer.status.number if peer.status.number >= 0 else None,
                peer.addresses,
                self.permissions.invitation_of(peer.name),
                since_1970 + peer.heard_at,
            )
            for peer in self.members.peers.values()
            if peer.heard_at
        ]
        me = KnownPeer(
            self.transport.peer,
            self.number if self.number >= 0 else None,
            self.members.addresses,
            self.permissions.invitation_of(self.transport.peer),
            time.time(),
            self.settings.name,
        )
        return [me, *known]

    def status(self) -> RunStatus:
        others = [
            MemberStatus(
                **msgspec.structs.asdict(peer.status),
                peer=peer.name,
                live=peer.live,
                left=peer.left,
                silent_seconds=round(clock.now() - peer.heard_at, 2),
                latency_seconds=round(peer.latency_seconds, 4),
                addresses=peer.addresses,
            )
            for peer in self.members.peers.values()
        ]
        me = MemberStatus(
            **msgspec.structs.asdict(self.own), peer=self.transport.peer, addresses=self.members.addresses
        )
        return RunStatus(
            run=self.permissions.run_id,
            members=tuple(sorted([me, *others], key=lambda member: (member.number < 0, member.number))),
            leader=self.members.leader(),
            leading={str(sequence): phase for sequence, phase in self.leader.phases().items()},
            banned=self.permissions.bans(),
        )

    def _emit(self, type_: str, fields: dict[str, object]) -> None:
        logger.info("%s %s", type_, fields)
        self._trainer.emit(type_, fields)
        if type_ == "excluded":
            self._start_task(self._withdraw())

    def _hurry(self, peer: str, sequence: int) -> None:
        """Have a slow worker post the work that it has."""
        if peer == self.transport.peer:
            self._trainer.post_now(sequence)
            return

        async def call() -> None:
            try:
                request = addressed(self.members, peer, messages.PostNow(sequence))
                await self.transport.call(peer, request, self.settings.lost_seconds)
            except (Unreachable, CallRefused) as problem:
                logger.info("%s was not told to post round %d: %s", peer, sequence, problem)

        self._start_task(call())

    def _on_round_end(self, agreed: Agreed) -> None:
        self.leader.record_end_elsewhere(agreed.plan.key.sequence)
        self.participant.transfers.expect_slower(agreed.late, self.settings.lost_seconds)
        self.members.attendance.record(agreed, [peer.name for peer in self.members.with_state()])
        if (leader := self.participant.leaders.record_end(agreed.plan)) is not None:
            self.members.emit_about("leader_passed_over", leader, round=agreed.plan.key.sequence)
        self.participant.leaders.patience_seconds = self.leader.patience_seconds

    # For the peers

    async def _on_call(self, peer: str, data: bytes) -> bytes:
        refusal: PeerRefused | None = None
        try:
            self.permissions.check(peer)
        except PeerRefused as reason:
            refusal = reason
        if refusal is not None and (refusal.kind != "unknown" or len(data) > _MAX_HELLO_BYTES):
            raise CallRefused.read(str(refusal))
        if not self._calls_of.take(peer, clock.now()):
            raise CallRefused("too many calls in a short time: some are left unanswered", "busy")
        try:
            version = messages.hello_version(data)
            if version is None and refusal is not None:
                raise refusal
            if version is not None and version.protocol != PROTOCOL:
                raise CallRefused(
                    f"this swarm speaks protocol {PROTOCOL} (diloco {__version__}), you speak {version.protocol} "
                    f"(diloco {version.version[:32]}): install the same version",
                    "version",
                )
            request = messages.decode(data)
            if isinstance(request, messages.Hello):
                return encode(self.heartbeats.answer_hello(peer, request))
            if isinstance(request, messages.Addressed):
                return encode(await self._answer(peer, open_addressed(self.members, peer, request)))
            return encode(self._answer_guest(request))
        except PeerRefused as reason:
            raise CallRefused.read(str(reason)) from None
        except Malformed as problem:
            if self.permissions.record_offence(peer, f"malformed: {problem}"):
                self.members.expel()
            raise CallRefused(str(problem), "malformed") from None

    def _answer_guest(self, request: PeerMessage) -> PeerMessage:
        """Answer a peer with a credential, which need not be a member."""
        match request:
            case messages.AskStatus():
                return messages.StatusAnswer(self.status())
            case messages.AskFiles():
                return messages.FileNames(tuple(self.files.names()))
            case messages.AskTime():
                return messages.Time(time.time())
            case messages.Measure():
                return messages.Measured(bytes(request.size))
        raise CallRefused("say hello first", "hello")

    async def _answer(self, peer: str, request: PeerMessage) -> PeerMessage:
        """Answer the held process of a member, or this node itself."""
        match request:
            case messages.Beat():
                return self.heartbeats.answer_beat(peer, request)
            case messages.AskNumber():
                return messages.Number(give_number(self.members, peer, request.wished))
            case messages.Goodbye():
                self.members.record_left(peer)
                return messages.Done()
            case messages.PostNow():
                if peer == self.members.leader() and request.sequence <= self.own.next_round:
                    self._trainer.post_now(request.sequence)
                return messages.Done()
            case messages.AskOutcome():
                return self.outcomes.answer(peer, request)
            case messages.AskLastPlan():
                return self.outcomes.answer_last()
            case messages.AskEnds():
                return self.outcomes.answer_ends(request)
            case messages.RoundsLost():
                return self.outcomes.answer_lost(peer, request)
            case messages.Ready():
                return self.leader.answer_ready(peer, request)
            case messages.Complete():
                return self.leader.record_complete(peer, request)
            case messages.Trouble():
                return self.leader.record_trouble(peer, request)
            case messages.Opposed():
                return self.leader.record_opposed(peer, request)
            case Plan():
                return self.participant.answer_plan(peer, request)
            case messages.Commit():
                return self.participant.answer_commit(peer, request)
            case messages.Inquire():
                return self.participant.answer_inquiry(peer, request)
        return await self.audit.answer(peer, request)

    async def _on_stream(self, stream: Stream) -> None:
        try:
            self.permissions.check(stream.peer)
            request = messages.decode(await read_frame(stream, 4096, self.settings.lost_seconds))
            if isinstance(request, messages.OpenFile):
                await self.files.send(stream, request, self.settings.stall_seconds)
            elif stream.peer not in self.members.peers:
                return
            elif isinstance(request, messages.OpenParts):
                await self.participant.serve_parts(stream, request)
            elif isinstance(request, messages.OpenMean):
                await self.outcomes.serve_mean(stream, request)
            elif isinstance(request, messages.OpenState):
                await self.states.serve(stream)
        except (PeerRefused, Malformed, Unreachable) as problem:
            logger.info("a stream of %s ended: %s", stream.peer, problem)
