"""Checks of `diloco doctor`: this machine's p2pd, port and addresses, and with an invitation the swarm.

With an invitation: which workers can be reached, how fast, and whether they reach us. This machine is a guest of the
swarm meanwhile: it shows the invitation's credential under a peer id of its own, is no member, and leaves nothing
behind.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from diloco.errors import ConfigError, DiLoCoError, install_hint
from diloco.own_command import command
from diloco.swarm import timing
from diloco.swarm.doctor.machine_checks import Finding, State
from diloco.swarm.network import multiaddr
from diloco.swarm.network.listening import ListenConfig, check_ports
from diloco.swarm.network.p2pd import control
from diloco.swarm.network.p2pd.daemon import Daemon
from diloco.swarm.network.p2pd.reachability import DialBackResult, answers_libp2p, own_addresses
from diloco.swarm.network.p2pd.transport import P2pdTransport, protocol_of
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.protocol.messages import AskStatus, AskTime, Hello, Measure, StatusAnswer, Time, expect
from diloco.swarm.protocol.status import MemberStatus, Status
from diloco.swarm.protocol.wire import PROTOCOL, Malformed, encode
from diloco.swarm.trust.invitation import Invitation, read_invitations
from diloco.version import __version__

_LATENCIES = 5
"""Calls whose median is the latency of a line."""
_PIECE = 512 << 10
_MAX_PIECES = 64
_AT_A_TIME = 4
_MAX_PEERS = 8
_MOST_SKEW = 30.0
_SOME_SKEW = 3.0
"""Seconds by which this machine's clock may differ before the check fails, or warns."""
_LITTLE_RELAY = 1 << 30
"""A relay that carries fewer bytes is of no use."""
_NO_ANSWER = "is a worker running there, its port open, or behind a router with no relay? Ask for a fresh invitation"
_NEW_INVITATION = "ask the owner of the run for a new invitation; to resume or to join with this one again is in vain"
_REMEDIES = {
    "revoked": _NEW_INVITATION,
    "banned": "the run's owner must say why this machine was excluded, and may invite it again",
    "seats": "ask the owner of the run for another invitation (diloco invite RUN): each is for one worker",
    "expired": _NEW_INVITATION,
    "forged": _NEW_INVITATION,
    "version": "install the same version of diloco as the others have",
}
Problem = (Unreachable, CallRefused, Malformed)


# This machine's network


async def check_daemon() -> Finding:
    try:
        control.messages()
        daemon = await Daemon.start(["-hostAddrs=/ip4/127.0.0.1/tcp/0"])
        await daemon.stop()
    except DiLoCoError as error:
        return Finding("p2pd", "failed", str(error), install_hint("swarm"))
    return Finding("p2pd", "ok", "runs")


def check_port(config: ListenConfig) -> Finding:
    try:
        check_ports(config.listen_addresses())
        config.announced_addresses()
    except DiLoCoError as error:
        return Finding("port", "failed", str(error), "choose another --host, --port or --announce")
    if config.port is None:
        return Finding("port", "ok", "any free one; choose it with --port if a router or firewall must let it in")
    return Finding("port", "ok", f"{config.port} is free")


def check_addresses() -> Finding:
    addresses = own_addresses()
    message = ", ".join(f"{ip} ({'public' if ip.is_global else 'private'})" for ip in addresses)
    if not addresses:
        return Finding("addresses", "failed", "no network", "connect this machine; workers on it alone need none")
    if any(ip.is_global for ip in addresses):
        return Finding("addresses", "ok", message)
    return Finding(
        "addresses",
        "ok",
        f"{message}: machines outside this network can reach it only if its router forwards a port (then --announce "
        "ROUTER:PORT), or through a public worker",
    )


# The swarm, with an invitation


def check_invitation(given: Sequence[str]) -> tuple[Finding, Invitation | None]:
    """Check the first invitation of those that `read_invitations` reads from `given`."""
    try:
        invitation = read_invitations(given, time.time())[0]
    except ConfigError as error:
        return Finding("invitation", "failed", str(error), f"ask for a new one: {command('invite', 'RUN')}"), None
    message = f"to the run {invitation.run_id}, valid until {invitation.until}; addresses: {len(invitation.addresses)}"
    if not invitation.addresses:
        return Finding("invitation", "failed", message, "ask for one with addresses, while a worker runs"), None
    return Finding("invitation", "ok", message), invitation


async def check_swarm(invitation: Invitation, config: ListenConfig) -> AsyncIterator[Finding]:
    """Make one check after the other; end early if no worker answers."""
    with TemporaryDirectory(prefix="diloco-doctor-") as folder:
        key = Path(folder) / "doctor.key"
        try:
            transport = await P2pdTransport.create(key, protocol_of(invitation.run_id), replace(config, guest=True))
        except DiLoCoError as error:
            yield Finding("p2pd", "failed", str(error), "see the lines above")
            return
        try:
            await transport.serve(_refuse_call, _refuse_stream)
            async for finding in _SwarmChecks(transport, invitation).run():
                yield finding
        finally:
            await transport.close()


class _SwarmChecks:
    def __init__(self, transport: P2pdTransport, invitation: Invitation) -> None:
        self._transport = transport
        self._invitation = invitation
        self._hosts: list[str] = []
        """Peers that have accepted our hello."""

    async def run(self) -> AsyncIterator[Finding]:
        for finding in await self._addresses():
            yield finding
        if not self._hosts:
            return
        yield await self._clock()
        async for finding in self._peers():
            yield finding
        for finding in await self._reach():
            yield finding

    async def _addresses(self) -> list[Finding]:
        """Try each address alone, so that one that works does not hide one that does not."""
        tried: list[tuple[str, str | None]] = []
        """Of each address what was found, and the remedy if it is of no use."""
        for address in self._invitation.addresses:
            route, peer = multiaddr.split_peer(address)
            try:
                await self._transport.disconnect(peer)
                started = time.monotonic()
                # `connect` alone does not tell: p2pd would also try the peer's other addresses.
                if not await answers_libp2p(route, timing.DOCTOR_SECONDS):
                    raise Unreachable("nothing there speaks libp2p")
                await self._transport.connect(peer, [address], timing.DOCTOR_SECONDS)
                took = time.monotonic() - started
                await self._hello(peer)
                tried.append((f"{route} answers, connected in {took * 1000:.0f} ms", None))
            except CallRefused as refused:  # a worker is there, and says why
                message = f"{route} answers, and does not let this machine in: {refused}"
                tried.append((message, _REMEDIES.get(refused.code, _NO_ANSWER)))
            except Problem as error:
                tried.append((f"{route} does not: {error}", _NO_ANSWER))
        bad: State = "failed" if all(remedy is not None for _, remedy in tried) else "warning"
        return [
            Finding("address", "ok", message) if remedy is None else Finding("address", bad, message, remedy)
            for message, remedy in tried
        ]

    async def _hello(self, peer: str) -> None:
        credential = self._invitation.credential(self._transport.peer, "guest").data()
        hello = Hello(PROTOCOL, __version__, "guest", credential, (), Status())
        expect(await self._transport.call(peer, encode(hello), timing.DOCTOR_SECONDS), Hello)
        if peer not in self._hosts:
            self._hosts.append(peer)

    async def _clock(self) -> Finding:
        try:
            started = time.time()
            answer = await self._transport.call(self._hosts[0], encode(AskTime()), timing.DOCTOR_SECONDS)
            swarm_time = expect(answer, Time).time
            skew = (started + time.time()) / 2 - swarm_time
        except Problem as error:
            return Finding("clock", "warning", f"cannot be compared: {error}", "run this again")
        difference = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the swarm's"
        if abs(skew) > _MOST_SKEW:
            return Finding(
                "clock", "failed", difference, "set this machine's clock (timedatectl set-ntp true), or theirs"
            )
        return Finding("clock", "warning" if abs(skew) > _SOME_SKEW else "ok", difference)

    async def _reach(self) -> list[Finding]:
        """Have a worker connect back to this machine, and look for a relay."""
        for peer in self._hosts:
            with contextlib.suppress(*Problem):
                seen = await self._transport.ask_dial_back(peer)
                if seen is None:
                    continue
                relay = await self._relay()
                return [_reachable(seen, has_relay=relay.state == "ok"), relay]
        message = "not known: no worker that answers could try to connect to this machine"
        return [Finding("reachable", "warning", message, "use an invitation with the address of a public worker")]

    async def _relay(self) -> Finding:
        for peer in self._hosts:
            with contextlib.suppress(*Problem):
                if await self._transport.relay_limit(peer) >= _LITTLE_RELAY:
                    return Finding("relay", "ok", f"{peer[-8:]} relays for machines behind routers")
        remedy = "machines behind routers need one worker with a public address or a forwarded port (--announce)"
        return Finding("relay", "warning", "no worker that answers is one", remedy)

    async def _peers(self) -> AsyncIterator[Finding]:
        """Measure the lines to live members, not only to those in the invitation."""
        try:
            answer = await self._transport.call(self._hosts[0], encode(AskStatus()), timing.DOCTOR_SECONDS)
            members = [member for member in expect(answer, StatusAnswer).status.members if member.live]
        except Problem as error:
            yield Finding("workers", "failed", f"the swarm does not list its workers: {error}", "run this again")
            return
        yield Finding("workers", "ok", f"{len(members)} in the swarm")
        for member in members[:_MAX_PEERS]:
            yield await self._measure(member)

    async def _measure(self, member: MemberStatus) -> Finding:
        peer = member.peer
        name = f"worker {member.number}"
        try:
            if peer not in self._hosts:
                await self._transport.connect(peer, list(member.addresses), timing.DOCTOR_SECONDS)
                await self._hello(peer)
            latency = await self._latency(peer)
            up = await self._speed(peer, up=True)
            down = await self._speed(peer, up=False)
            used = (await self._transport.connections()).get(peer, [])
        except (*Problem, ConfigError) as error:
            return Finding(name, "warning", f"{peer[-8:]} does not answer here: {error}", _NO_ANSWER)
        relayed = bool(used) and all(multiaddr.CIRCUIT in address for address in used)
        way = "through a relay" if relayed else "directly"
        message = f"{peer[-8:]} {way}: {latency * 1000:.1f} ms, {up:.1f} MB/s up, {down:.1f} MB/s down"
        return Finding(name, "ok", message)

    async def _latency(self, peer: str) -> float:
        seconds = []
        for _ in range(_LATENCIES):
            started = time.monotonic()
            await self._transport.call(peer, encode(AskTime()), timing.DOCTOR_SECONDS)
            seconds.append(time.monotonic() - started)
        return statistics.median(seconds)

    async def _speed(self, peer: str, *, up: bool) -> float:
        """Measure MB/s with calls of 512 KiB: the line may be faster, not slower."""
        request = encode(Measure(0 if up else _PIECE, bytes(_PIECE if up else 0)))
        started = time.monotonic()
        done = 0

        async def ask() -> None:
            nonlocal done
            while time.monotonic() - started < timing.DOCTOR_MEASURE_SECONDS and done < _MAX_PIECES:
                await self._transport.call(peer, request, timing.DOCTOR_SECONDS + timing.DOCTOR_MEASURE_SECONDS)
                done += 1

        await asyncio.gather(*(ask() for _ in range(_AT_A_TIME)))
        return done * _PIECE / 1e6 / (time.monotonic() - started)


def _reachable(seen: DialBackResult, *, has_relay: bool) -> Finding:
    """Say what it means for this machine how a worker sees it."""
    if seen.reachable:
        return Finding("reachable", "ok", f"public: the swarm can connect to this machine at {seen.ip}")
    if seen.ip in map(str, own_addresses()):
        kind = "behind a firewall"
        remedy = "for direct connections let the port (--port) in"
    else:
        kind = f"behind a router whose address is {seen.ip}"
        remedy = "for direct connections forward a port to this machine and choose it with --port"
    if has_relay:
        return Finding("reachable", "warning", f"{kind}: others reach it through a relay", remedy)
    return Finding("reachable", "failed", f"{kind}: and no worker relays for it", remedy)


async def _refuse_call(peer: str, request: bytes) -> bytes:
    del peer, request
    raise CallRefused("a guest answers no calls")


async def _refuse_stream(stream: Stream) -> None:
    stream.close()
