"""Four honest members and one that attacks: how late rounds are, whether the honest agree, and what becomes of it.

    python benchmarks/adversary.py

The nodes are the swarm's own, with all of its protocol; the network is in memory and the clock virtual, so that a
minute of waiting costs nothing and every run is the same. No model is trained: contributions are known vectors, and the
error of a mean is its distance from that of the honest ones, as a share of it.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import search_path  # noqa: F401  `support` of the tests
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.frames import write_frame
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.plan import Authority
from diloco.swarm.simulator.stories import founded, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker
from diloco.swarm.trainer import RoundOutcome
from measuring import write_results

ROUNDS = 8
ROUND_SECONDS = 10.0
NUMEL = 4_000
RATIO = 3.0
"""The bound on norms, sync.max_norm_ratio."""
COMMON = torch.randn(NUMEL, generator=torch.Generator().manual_seed(7))


def honest(number: int, sequence: int) -> torch.Tensor:
    return COMMON + 0.7 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * sequence + number))


@dataclass(frozen=True)
class Attack:
    """What the bad member does, and the swarm's options."""

    name: str
    values: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What the bad member sends in place of its honest work; None: its honest work."""
    options: dict[str, Any] | None = None
    """Options of the bad member's post."""
    begin: Callable[[list[MemoryWorker], MemoryWorker], Coroutine[Any, Any, None]] | None = None
    """Runs beside all rounds."""
    posts: bool = True
    first: bool = False
    """The bad member has number 0, and leads."""
    merge: str = "mean"


@dataclass(frozen=True)
class Row:
    attack: str
    times_calm: float
    slowest_times_calm: float
    agreed: bool
    failed: int
    worst_error: float
    last_error: float
    banned_after: int | None


async def take_terms(workers: list[MemoryWorker], bad: MemoryWorker, term: int) -> None:
    while True:
        sequence = max(worker.node.own.next_round for worker in workers)
        for worker in workers:
            try:
                inquire = messages.Inquire(sequence, Authority(term, -bad.node.number))
                answer = await bad.node.participant.calls.ask(worker.name, inquire)
            except (CallRefused, Unreachable):
                continue
            if term < 1000 and isinstance(answer, messages.Superseded | messages.Posted):
                term = max(term, answer.seen.term + 1)
        await asyncio.sleep(0.5)


async def flood(workers: list[MemoryWorker], bad: MemoryWorker) -> None:
    while True:
        for worker in workers:
            for _ in range(50):
                with contextlib.suppress(CallRefused, Unreachable):
                    await bad.node.participant.calls.ask(worker.name, messages.AskOutcome(0))
        await asyncio.sleep(0.5)


async def lead_badly(_: list[MemoryWorker], bad: MemoryWorker) -> None:
    bad.node.leader.answer_ready = lambda *_: messages.Waiting()  # type: ignore[method-assign]


async def pretend(_: list[MemoryWorker], bad: MemoryWorker) -> None:
    bad.node._own_checks.run = lambda: None  # type: ignore[method-assign]


async def withhold_parts(_: list[MemoryWorker], bad: MemoryWorker) -> None:
    send = Transfer._send

    async def nothing(self: Transfer, stream: Stream, data: memoryview) -> None:
        if self._transport.peer != bad.name:
            await send(self, stream, data)

    Transfer._send = nothing  # type: ignore[method-assign]
    try:
        await asyncio.sleep(1e9)
    finally:
        Transfer._send = send  # type: ignore[method-assign]


async def drip(_: list[MemoryWorker], bad: MemoryWorker) -> None:
    send = Transfer._send_mean

    async def byte_by_byte(self: Transfer, stream: Stream) -> None:
        if self._transport.peer != bad.name:
            await send(self, stream)
        for byte in bytes(self._mean(self._mine)) if self._transport.peer == bad.name else b"":
            await write_frame(stream, bytes([byte]), 5.0)
            await asyncio.sleep(1.0)

    Transfer._send_mean = byte_by_byte  # type: ignore[method-assign]
    try:
        await asyncio.sleep(1e9)
    finally:
        Transfer._send_mean = send  # type: ignore[method-assign]


async def keep_alive(_: list[MemoryWorker], bad: MemoryWorker) -> None:
    send = Transfer._send_mean

    async def empty(self: Transfer, stream: Stream) -> None:
        if self._transport.peer != bad.name:
            return await send(self, stream)
        while True:
            await write_frame(stream, b"", 5.0)
            await asyncio.sleep(1.0)

    Transfer._send_mean = empty  # type: ignore[method-assign]
    try:
        await asyncio.sleep(1e9)
    finally:
        Transfer._send_mean = send  # type: ignore[method-assign]


ATTACKS = (
    Attack("none"),
    Attack("contribution × −900", lambda v: -900 * v),
    Attack("weight 10¹⁸, turned around", lambda v: -v, {"weight": 1e18, "round_weight": 1e18}),
    Attack("five rounds of work in each, turned around", lambda v: -v, {"weight": 5.0, "round_weight": 1.0}),
    Attack("NaN", lambda v: v * float("nan")),
    Attack("claims a small norm, sends 10³⁰", lambda v: 1e30 * v, {"claimed": 100.0}),
    Attack("posts first, with another layout", options={"layout": "another"}),
    Attack("posts first, with another bound on norms", options={"ratio": 1e9}),
    Attack("never posts", begin=pretend, posts=False),
    Attack("leads, and never makes a plan", begin=lead_badly, first=True),
    Attack("inquires with the highest term", begin=lambda w, b: take_terms(w, b, 1 << 53)),
    Attack("inquires again and again", begin=lambda w, b: take_terms(w, b, 1)),
    Attack("keep-alive frames instead of means", begin=keep_alive),
    Attack("a byte of the mean each second", begin=drip),
    Attack("posts, and never sends its parts", begin=withhold_parts),
    Attack("a flood of calls", begin=flood),
    Attack("wrong direction at an honest norm", lambda v: -v),
    Attack("the same, merge = clipped", lambda v: -v, merge="clipped"),
)


def run(attack: Attack) -> tuple[list[float], Row]:
    async def simulate_rounds(swarm: MemorySwarm) -> tuple[list[float], Row]:
        workers = await founded(swarm, 5)
        bad = workers.pop(0 if attack.first else 4) if attack.name != "none" else workers[4]
        attack_task = None if attack.begin is None else asyncio.create_task(attack.begin(workers, bad))
        round_seconds: list[float] = []
        errors: list[float] = []
        agreed = True
        failed = 0
        banned_after = None
        for sequence in range(ROUNDS):
            started = clock.now()
            bad_post = None
            if attack.posts and bad not in workers:
                bad_post = asyncio.create_task(post(bad, attack, sequence))
                await asyncio.sleep(0.05)
            outcomes = await asyncio.gather(*(post(worker, attack, sequence, good=True) for worker in workers))
            round_seconds.append(clock.now() - started)
            failed += sum(outcome.failure is not None for outcome, _ in outcomes)
            means = {mean for outcome, mean in outcomes if outcome.failure is None}
            agreed &= len(means) == 1
            honest_mean = torch.stack([honest(worker.node.number, sequence) for worker in workers]).mean(0)
            mean_values = torch.frombuffer(bytearray(next(iter(means))), dtype=torch.float32)[:NUMEL]
            errors.append(float((mean_values - honest_mean).norm() / honest_mean.norm()))
            if banned_after is None and all(bad.name in worker.node.permissions.bans() for worker in workers):
                banned_after = sequence + 1
            if bad_post is not None:
                bad_post.cancel()
            await asyncio.sleep(ROUND_SECONDS)
        if attack_task is not None:
            attack_task.cancel()
        row = Row(
            attack.name,
            median(round_seconds),
            max(round_seconds),
            agreed,
            failed,
            max(errors),
            errors[-1],
            banned_after,
        )
        return round_seconds, row

    return told(simulate_rounds, lost_seconds=5.0, beat_seconds=1.0, patience=0.5)  # type: ignore[no-any-return]


async def post(
    worker: MemoryWorker, attack: Attack, sequence: int, *, good: bool = False
) -> tuple[RoundOutcome, bytes]:
    values = honest(worker.node.number, sequence)
    options = {"ratio": RATIO, "merge": attack.merge, "seconds": 600.0}
    if not good:
        values = values if attack.values is None else attack.values(values)
        options |= attack.options or {}
        await worker.catch_up()
    return await worker.post(values, sequence=sequence, **options)


def main() -> int:
    logging.disable(logging.CRITICAL)
    table = Table(
        "attack", "rounds, × calm", "slowest, × calm", "one mean", "failed", "worst error", "last error", "banned after"
    )
    rows: list[dict[str, object]] = []
    calm = 0.0
    for attack in ATTACKS:
        round_seconds, row = run(attack)
        median_seconds = ROUND_SECONDS + median(round_seconds)
        calm = calm or median_seconds
        row = Row(
            row.attack,
            median_seconds / calm,
            (ROUND_SECONDS + max(round_seconds)) / calm,
            row.agreed,
            row.failed,
            row.worst_error,
            row.last_error,
            row.banned_after,
        )
        rows.append(asdict(row))
        table.add_row(
            row.attack, f"{row.times_calm:.2f}", f"{row.slowest_times_calm:.2f}", "yes" if row.agreed else "no",
            str(row.failed), f"{row.worst_error:.2f}", f"{row.last_error:.2f}",
            "" if row.banned_after is None else f"{row.banned_after} rounds",
        )  # fmt: skip
    Console(width=140).print(table)
    write_results("adversary", {"rounds": ROUNDS, "members": len(NAMES[:5]), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
