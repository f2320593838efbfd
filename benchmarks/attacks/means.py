"""Attacks by what a member says of means: as a reducer, as one that has ended a round, as an accuser."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs

from attacks import has_begun, instead_of, node
from attacks.contributions import with_fields
from diloco.swarm.network.transport import Stream
from diloco.swarm.node.audit import Lie
from diloco.swarm.node.frames import write_frame
from diloco.swarm.node.heartbeats import Heartbeats
from diloco.swarm.node.node import Node
from diloco.swarm.node.outcomes import Outcomes
from diloco.swarm.node.transfer import Transfer, comparison_bytes
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.certificate import Certificate, RangeDigest, directions_bytes, range_digests

_NAN = bytes.fromhex("007e")  # in fp16


def forged_end() -> None:
    """It says that the round has ended, with a mean of NaN and votes that it has made for all."""

    def forge(sequence: int) -> messages.Outcome:
        own_node = node()
        last = node().outcomes.recent.get(node().own.ended_round)
        if last is None:
            return messages.Outcome()
        entries = tuple(
            structs.replace(
                entry,
                contribution=structs.replace(
                    entry.contribution, header=with_fields(entry.contribution.header, at_1=sequence)
                ),
            )
            for entry in last.plan.entries
        )
        key = replace(last.plan.key, sequence=sequence)
        plan = structs.replace(last.plan, key=key, entries=entries, shares=())
        parts = last.certificate.num_parts
        data = _NAN * (len(last.mean) // 2)
        notary = own_node.outcomes.notary
        directions = bytes(directions_bytes(plan))
        ranges = tuple(notary.sign_range(plan, digest, directions) for digest in range_digests(plan, parts, data))
        vote = notary.vote(plan, parts, ranges)
        return messages.Outcome(plan, Certificate(parts, ranges, {entry.peer: vote.signature for entry in entries}))

    @instead_of(Node, "_answer")
    async def answer(honest: Callable[..., Any], self: Node, peer: str, request: Any) -> Any:
        if has_begun() and peer != self.transport.peer:
            if isinstance(request, messages.Ready | messages.Inquire):
                return messages.Ended()
            if isinstance(request, messages.AskOutcome) and request.sequence > self.own.ended_round:
                return forge(request.sequence)
        return await honest(self, peer, request)

    @instead_of(Heartbeats, "_beat_for")
    def beat(honest: Callable[..., messages.Beat], self: Heartbeats, *arguments: Any) -> messages.Beat:
        honest_beat = honest(self, *arguments)
        if not has_begun():
            return honest_beat
        return structs.replace(
            honest_beat, status=structs.replace(honest_beat.status, ended_round=honest_beat.status.ended_round + 1)
        )

    @instead_of(Outcomes, "serve_mean")
    async def serve(honest: Callable[..., Any], self: Outcomes, stream: Stream, request: messages.OpenMean) -> None:
        last = self.recent.get(self.members.status.ended_round)
        if not has_begun() or last is None or request.sequence <= self.members.status.ended_round:
            await honest(self, stream, request)
            return
        await stream.write(len(last.mean).to_bytes(8, "little"), 1.0)
        await write_frame(stream, _NAN * (len(last.mean) // 2), 1.0)


def wrong_mean() -> None:
    """As a reducer it turns its part of the mean around, signs that, gives it to all and votes for it."""

    @instead_of(Transfer, "_reduce_rows")
    def reduce(honest: Callable[..., Any], self: Transfer, rows: range) -> Any:
        if not has_begun(self.plan.key.sequence):
            return honest(self, rows)
        signatures = self._signatures
        add = signatures.add
        signatures.add = lambda *_: None  # type: ignore[method-assign]
        mean, squares, comparison = honest(self, rows)
        signatures.add = add  # type: ignore[method-assign]
        decoded = torch.empty(len(rows), self.posted.part_elements)
        self._means.decode(mean, decoded)
        self._means.encode(-decoded, mean)
        add(self._transport.peer, mean.view(-1).numpy().data)
        return mean, squares, comparison


def different_means() -> None:
    """As a reducer it gives every second worker another mean, and signs both."""

    @instead_of(Transfer, "_send_mean")
    async def send(honest: Callable[..., Any], self: Transfer, stream: Stream) -> None:
        other_peers = [entry.peer for entry in self.plan.entries if entry.peer != self._transport.peer]
        if not has_begun(self.plan.key.sequence) or other_peers.index(stream.peer) % 2 or not len(self._mine):
            await honest(self, stream)
            return
        await self._wait_until(lambda: self._reduced == len(self._mine), 5.0)
        wrong = memoryview(bytes(len(self._mean(self._mine))))
        digest = RangeDigest(self._mean_width)
        digest.add(wrong)
        await write_frame(stream, wrong, 1.0)
        await write_frame(stream, bytes(comparison_bytes(len(self.plan.contributors))), 1.0)
        directions = bytes(directions_bytes(self.plan))
        signature = node().outcomes.notary.sign_range(self.plan, digest.digest(), directions)
        await write_frame(stream, directions + signature.signature, 1.0)


def false_accusation() -> None:
    """In every round it says that the parts of an honest member are not what was claimed."""

    @instead_of(Transfer, "run")
    async def run(honest: Callable[..., Any], self: Transfer) -> None:
        victims = [e.peer for e in self.plan.entries if e.peer not in (self._transport.peer, self.plan.leader)]
        if has_begun(self.plan.key.sequence) and victims:
            raise Lie(victims[0], "its parts have the norm 900, it claimed 1")
        await honest(self)


def keep_alive_frames() -> None:
    """As a reducer it sends empty frames for ever instead of the mean."""

    @instead_of(Transfer, "_send_mean")
    async def send(honest: Callable[..., Any], self: Transfer, stream: Stream) -> None:
        while has_begun(self.plan.key.sequence):
            await write_frame(stream, b"", 5.0)
            await asyncio.sleep(1.0)
        await honest(self, stream)
