"""The numbers of a swarm's run on one machine, where workers come and go, and jump in the schedule. Torch-free.

Bytes, seconds and the comparison with data-parallel training are of this machine's own workers and of the steps that
they took themselves. `tokens` is of the whole swarm, and `local_tokens` of this machine's share in it: what is behind
the contributions in the run's means (training/swarm/token_counts.py), the same on every machine.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.history.log import Event

_COUNTED = ("tokens", "elapsed_seconds", "sync_seconds", "bytes_sent")


@dataclass
class OwnWork:
    """What one worker of this machine has done, in all its starts."""

    tokens: int = 0
    elapsed_seconds: float = 0.0
    sync_seconds: float = 0.0
    bytes_sent: int = 0


def own_work(log: Sequence[Event]) -> dict[int, OwnWork]:
    """By worker. A worker that joins again counts from 0 again, one that resumes from a checkpoint goes on counting."""
    before: dict[int, OwnWork] = {}
    latest: dict[int, OwnWork] = {}
    for event in log:
        worker = event["worker"]
        if event["type"] == "joined":
            before[worker] = _sum(before.get(worker), latest.pop(worker, None))
        elif event["type"] in ("step", "worker_finished", "worker_failed"):
            now = latest.setdefault(worker, OwnWork())
            for name in _COUNTED:
                setattr(now, name, event.get(name, getattr(now, name)))
    return {worker: _sum(before.get(worker), latest.get(worker)) for worker in before.keys() | latest.keys()}


def _sum(first: OwnWork | None, second: OwnWork | None) -> OwnWork:
    first, second = first or OwnWork(), second or OwnWork()
    return OwnWork(*(getattr(first, name) + getattr(second, name) for name in _COUNTED))


def swarm_numbers(log: Sequence[Event], events: Sequence[Event], ended: Event | None) -> dict[str, Any]:
    """`events`: without those that a resume has taken back. `ended`: the end of the worker that speaks for all."""
    work = own_work(log)
    rounds = [event for event in events if event["type"] == "round"]
    tokens = _tokens(rounds, work, ended)
    per_step = _tokens_per_step(events)
    shares = [1 - one.sync_seconds / one.elapsed_seconds for one in work.values() if one.elapsed_seconds]
    confirmed = (ended or {}).get("confirmed") or []
    digests = [member["anchor_digest"] for member in confirmed] or [e["anchor_digest"] for e in [ended] if e]
    roster: list[int] = next((event["roster"] for event in reversed(rounds) if event["roster"]), [])
    most = max((tokens.get(worker, 0) for worker in work), default=0)
    return {
        "workers": len(confirmed) or max(1, len(roster)),
        "members_seen": max(1, len(tokens)),
        "tokens": sum(tokens.values()),
        "anchor_digests": digests,
        "local_workers": len(work),
        "local_steps": most // per_step if per_step else 0,
        "local_rounds": len({e["sequence"] for e in rounds if not work.keys().isdisjoint(e["contributors"])}),
        "local_tokens": sum(tokens.get(worker, 0) for worker in work),
        "bytes_sent_per_worker": max((one.bytes_sent for one in work.values()), default=0),
        "compute_utilization": statistics.fmean(shares) if shares else None,
        "training_seconds": max((one.elapsed_seconds for one in work.values()), default=0.0),
    }


def _tokens(rounds: Sequence[Event], work: Mapping[int, OwnWork], ended: Event | None) -> dict[int, int]:
    """By worker, as all members have counted them; of a run that was killed, or of an earlier version, as far as this
    machine has heard of them."""
    counted = (ended or {}).get("tokens_by_worker")
    if counted:
        return {int(worker): tokens for worker, tokens in counted.items()}
    tokens = {worker: one.tokens for worker, one in work.items()}
    for event in rounds:
        for member in event["members"]:
            if member["worker"] not in work:
                tokens[member["worker"]] = max(tokens.get(member["worker"], 0), member["report"]["tokens"])
    return tokens


def steps_of_bytes(log: Sequence[Event], events: Sequence[Event]) -> int:
    """The inner steps of this machine's busiest worker in all its starts, with those that are lost: it has sent bytes
    for them too."""
    per_step = _tokens_per_step(events)
    return max((one.tokens for one in own_work(log).values()), default=0) // per_step if per_step else 0


def _tokens_per_step(events: Sequence[Event]) -> int:
    return next((int(event["tokens_per_step"]) for event in events if event["type"] == "worker_started"), 0)


def usual_workers(events: Sequence[Event]) -> int:
    """How many contributions a round had, on average: as many workers a data-parallel run would have had."""
    counts = [
        len(event["contributors"]) for event in events if event["type"] == "round" and event["mean_norm"] is not None
    ]
    return max(1, round(statistics.fmean(counts))) if counts else 1
