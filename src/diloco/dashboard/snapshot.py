"""The state of a run at a moment, as JSON: what the page shows beside its curves."""

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from diloco.dashboard.columns import finite
from diloco.dashboard.members import GONE
from diloco.dashboard.record import RunRecord, Worker
from diloco.dashboard.rounds import Round
from diloco.history.progress import DOING
from diloco.training.records.summary import data_parallel_bytes

Json = dict[str, Any]
SILENT_SECONDS = 120.0
_LISTED = 50
_AMISS = ("lost", "banned", "excluded", "failed")
_USUAL = 5  # a straggler was the last in a fifth of the rounds


def snapshot(
    record: RunRecord, options: Mapping[str, Any], summary: Json | None, until: float | None, now: float
) -> Json:
    """`until`: a moment of the run; None: now. `summary`: the content of summary.json, if the run has ended."""
    live = until is None
    rounds = record.rounds.until(until)
    workers = [_worker(number, one, until) for number, one in sorted(record.workers.items()) if _known(one, until)]
    members = record.members.until(until)
    _agree(workers, members)
    _complete(record, members, rounds)
    local = [one for one in workers if one["local"]] or workers
    steps = finite(options.get("steps"))
    swarm = options.get("engine") == "swarm"
    step = _step(local, swarm=swarm)
    running = [one for one in workers if one["active"]] or [one for one in workers if one["state"] not in _AMISS]
    rate = sum(one["tokens_per_second"] or 0.0 for one in running)
    shares = [one["utilization"] for one in local if one["utilization"] is not None]
    end = until if until is not None else record.clock.last
    return {
        "status": _status(record, workers, summary, until, now),
        "error": summary.get("error") if live and summary else None,
        "mode": options.get("mode"),
        "events": record.events,
        "first_time": record.clock.first,
        "last_time": record.clock.last,
        "time": end,
        "now": now,
        "pauses": record.clock.pauses,
        "seconds": record.clock.seconds(until),
        "step": step,
        "steps": steps,
        "seconds_left": _seconds_left(local, steps, swarm=swarm),
        "loss": _mean([one["loss"] for one in local]),
        "validation": _validation(record, until),
        "tokens": int(sum(one["tokens"] or 0 for one in workers)),
        "tokens_per_second": rate,
        "utilization": (finite(summary.get("compute_utilization")) if live and summary else None) or _mean(shares),
        "rounds": _rounds(rounds) | _told(record, rounds, until),
        "communication": _communication(record, rounds, local, until),
        "health": _health(record, workers, members, until),
        "doing": _doing(record, local),
        "workers": workers,
        "members": members,
        "members_left_out": record.members.left_out,
        "last_digests": record.members.last_digests if live else {},
        "notes": [
            {"time": note.time, "kind": note.kind, "text": note.text}
            for note in record.notes.notes
            if live or note.time <= (until or 0)
        ][-200:],
        "samples": [one for one in record.samples if live or one["time"] <= (until or 0)][-20:],
        "parameters": record.parameters,
        "unigram_perplexity": record.unigram_perplexity,
        "summary": summary if live else None,
    }


def _known(worker: Worker, until: float | None) -> bool:
    return until is None or worker.columns.last("time", until) is not None or _state(worker, until) is not None


def _state(worker: Worker, until: float | None) -> str | None:
    return next((state for time, state in reversed(worker.states) if until is None or time <= until), None)


def _worker(number: int, worker: Worker, until: float | None) -> Json:
    last = {name: worker.columns.last(name, until) for name in worker.columns.names}
    elapsed = last["elapsed_seconds"]
    state = _state(worker, until) or ("training" if last["time"] is not None else "")
    return {
        "worker": number,
        "local": worker.local,
        "state": state,
        "active": state not in ("done", "failed", ""),
        "utilization": 1 - (last["sync_seconds"] or 0.0) / elapsed if elapsed else None,
        "error": worker.ended.get("error") if worker.ended and until is None else None,
        **dict(worker.started),
        **last,
    }


def _agree(workers: list[Json], members: list[Json]) -> None:
    """One state for a worker that is also a member: of this machine its own, of another the swarm's."""
    by_number = {one["worker"]: one for one in workers}
    for member in members:
        worker = by_number.get(member["member"])
        if worker is None:
            continue
        if worker["local"] and not worker["active"] and member["state"] not in GONE:
            member["state"] = worker["state"]
        elif not worker["local"]:
            worker["state"], worker["active"] = member["state"], member["state"] not in GONE


def _complete(record: RunRecord, members: list[Json], rounds: list[Round]) -> None:
    """Members are listed every ten seconds: the last round of each, and since when those of this machine are there."""
    contributed = {worker: one.sequence for one in rounds if one.merged for worker in one.contributors}
    for member in members:
        number = member["member"]
        if number in contributed:
            member["contributed"] = max(contributed[number], int(member["contributed"] or 0))
        worker = record.workers.get(number)
        if worker is not None and worker.local and worker.states:
            member["joined"] = min(member["joined"], worker.states[0][0])


def _health(record: RunRecord, workers: list[Json], members: list[Json], until: float | None) -> Json:
    """Whether all is well: how many workers are there, which are not, and whose loss is no number."""
    states = {one["worker"]: one["state"] for one in workers}
    for one in members:
        if one["member"] not in states or not record.workers[one["member"]].local or one["state"] in GONE:
            states[one["member"]] = one["state"]
    expected = max((one.started.get("workers") or 0 for one in record.workers.values()), default=0)
    return {
        "present": sum(state not in (*GONE, "failed") for state in states.values()),
        "all": max(len(states), expected),
        "lost": sorted(number for number, state in states.items() if state in _AMISS),
        "left": sorted(number for number, state in states.items() if state == "left"),
        "not_finite": sorted(number for number, one in record.workers.items() if _diverged(one, until)),
    }


def _diverged(worker: Worker, until: float | None) -> bool:
    return next((lost for time, lost in reversed(worker.not_finite) if until is None or time <= until), False)


def _doing(record: RunRecord, workers: list[Json]) -> str | None:
    """What the workers do before the first step is logged; None from then on, as in the terminal."""
    if not record.events or any(one["step"] for one in workers):
        return None
    states = [one["state"] for one in workers if one["active"]]
    return DOING.get(states[0], states[0]) if states else DOING["started"]


def _step(workers: list[Json], *, swarm: bool) -> int:
    """As in the terminal: of the slowest worker; in a swarm, of the furthest local one."""
    steps = [int(one["step"] or 0) for one in workers]
    return (max if swarm else min)(steps, default=0)


def _seconds_left(workers: list[Json], steps: float | None, *, swarm: bool) -> float | None:
    """As in the terminal (`records.progress.seconds_left`), at the speed of that moment."""
    if steps is None:
        return None
    known = [(steps - (one["step"] or 0)) * one["position_seconds"] for one in workers if one["position_seconds"]]
    return max(0.0, (min if swarm else max)(known)) if known else None


def _validation(record: RunRecord, until: float | None) -> Json | None:
    values = record.validations.until(until)
    if not len(values["step"]):
        return None
    losses = values["loss"]
    best = None if np.isnan(losses).all() else int(np.nanargmin(losses))
    return {
        "step": int(values["step"][-1]),
        "loss": finite(losses[-1]),
        "perplexity": finite(values["perplexity"][-1]),
        "best_perplexity": None if best is None else finite(values["perplexity"][best]),
        "best_step": None if best is None else int(values["step"][best]),
    }


def _rounds(rounds: list[Round]) -> Json:
    merged = [one for one in rounds if one.merged]
    failed = [one for one in rounds if one.failure is not None]
    refused = [one for one in rounds if one.refused or one.clipped]
    compared = [one for one in merged if one.digests]
    unequal = [one for one in compared if len(one.digests) > 1]
    last = merged[-1] if merged else None
    stragglers = [one.straggler for one in rounds[-100:] if one.straggler is not None]
    usual = statistics.mode(stragglers) if stragglers else -1
    often = {"worker": usual, "rounds": stragglers.count(usual), "of": len(rounds[-100:])}
    is_usual = often["rounds"] * _USUAL >= often["of"]
    return {
        "refused": sum(len(one.refused) for one in rounds),
        "clipped": sum(len(one.clipped) for one in rounds),
        "last": None if last is None else last.as_json(),
        "cosines": [] if last is None else last.cosines,
        "digests_compared": len(compared),
        "digests_unequal": [
            {"sequence": one.sequence, "workers": one.odd_workers, "merged": one.merged} for one in unequal[-_LISTED:]
        ],
        "failures": [
            {"sequence": one.sequence, "step": one.step, "time": one.time, "reason": one.failure,
             "workers": sorted(w for w, part in one.workers.items() if part.failure is not None),
             "merged_by_others": one.merged}
            for one in failed[-_LISTED:]
        ],
        "refusals": [
            {"sequence": one.sequence, "step": one.step, "time": one.time, "refused": one.refused,
             "clipped": one.clipped}
            for one in refused[-_LISTED:]
        ],
        "straggler": often if stragglers and is_usual else None,
    }  # fmt: skip


def _told(record: RunRecord, rounds: list[Round], until: float | None) -> Json:
    """Merged and failed rounds, also those before a worker of this machine joined, which its own count includes."""
    local = [one for one in record.workers.values() if one.local]
    merged = [int(one.columns.last("rounds", until) or 0) for one in local]
    failed = [int(one.ended.get("rounds_failed") or 0) for one in local if one.ended and until is None]
    return {
        "merged": max([sum(one.merged for one in rounds), *merged]),
        "failed": max([sum(one.failure is not None for one in rounds), *failed]),
    }


def _communication(record: RunRecord, rounds: list[Round], workers: list[Json], until: float | None) -> Json:
    """Bytes of a worker, against averaging fp32 gradients at every step, and against what its link carried."""
    del until
    sent = max((int(one["bytes_sent"] or 0) for one in workers), default=0)
    peers = record.usual_workers([len(one.contributors) for one in rounds if one.merged])
    first = max(workers, key=lambda one: one["tokens"] or 0, default=None)
    taken = 0 if first is None or not record.tokens_per_step else int(first["tokens"] or 0) // record.tokens_per_step
    baseline = data_parallel_bytes(record.trainable_parameters, taken, peers)
    seconds = max((one["elapsed_seconds"] or 0.0 for one in workers), default=0.0)
    rates = [one.bytes_sent / one.seconds for one in rounds if one.seconds and one.bytes_sent]
    return {
        "bytes_sent_per_worker": sent,
        "data_parallel_bytes_per_worker": baseline,
        "reduction": baseline / sent if sent else None,
        "workers": peers,
        "mean_bytes_per_second": sent / seconds if seconds else None,
        "data_parallel_bytes_per_second": baseline / seconds if seconds else None,
        "link_bytes_per_second": max(rates, default=None),
        "link_share": sent / seconds / max(rates) if rates and seconds else None,
    }


def _status(record: RunRecord, workers: list[Json], summary: Json | None, until: float | None, now: float) -> str:
    """complete, stopped, failed, training, silent (no event for a while), starting, or empty."""
    if not record.events:
        return "empty"
    local = [one for one in workers if one["local"]]
    if until is not None and record.clock.last is not None and until < record.clock.last:
        return "training" if any(one["step"] for one in local) else "starting"
    if summary is not None and isinstance(summary.get("status"), str):
        return str(summary["status"])
    if local and not any(one["active"] for one in local):
        return "failed" if all(one["state"] == "failed" for one in local) else "complete"
    if record.clock.last is not None and now - record.clock.last > SILENT_SECONDS:
        return "silent"
    return "training" if any(one["step"] for one in local) else "starting"


def _mean(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None
