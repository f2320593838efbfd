"""The state of a run at a moment, as JSON: what the page shows beside its curves."""

from collections.abc import Mapping
from typing import Any

from diloco.history.columns import finite
from diloco.history.events import ROUND_STATISTICS
from diloco.history.figures import MemberFigures, RunFigures, WorkerFigures
from diloco.history.rounds import RoundHistory, WorkerRound

Json = dict[str, Any]
SILENT_SECONDS = 120.0
_LISTED = 50


def snapshot(figures: RunFigures, options: Mapping[str, Any], summary: Json | None, now: float) -> Json:
    """Return what the page shows beside the curves. `summary`: the content of summary.json, if the run has ended."""
    history = figures.history
    until = figures.until
    live = until is None
    steps = finite(options.get("steps"))
    tokens_at_end = finite(summary.get("tokens")) if live and summary else None
    own_utilization = finite(summary.get("compute_utilization")) if live and summary else None
    return {
        "status": _status(figures, summary, now),
        "error": summary.get("error") if live and summary else None,
        "mode": options.get("mode"),
        "events": history.events,
        "first_time": history.clock.first,
        "last_time": history.clock.last,
        "time": until if until is not None else history.clock.last,
        "now": now,
        "pauses": history.clock.pauses,
        "seconds": history.clock.seconds(until),
        "step": figures.step,
        "steps": steps,
        "seconds_left": figures.seconds_left(steps),
        "loss": figures.loss,
        "validation": None if figures.validation is None else vars(figures.validation),
        "tokens": figures.tokens if tokens_at_end is None or figures.elastic else int(tokens_at_end),
        "run_tokens": int(tokens_at_end) if tokens_at_end is not None and figures.elastic else figures.run_tokens,
        "tokens_per_second": figures.tokens_per_second,
        "utilization": own_utilization or figures.utilization,
        "rounds": _rounds(figures),
        "communication": _communication(figures),
        "health": {
            "present": figures.present,
            "all": max(len(figures.states), figures.expected_workers),
            "lost": figures.lost,
            "left": figures.left,
            "not_finite": figures.not_finite,
        },
        "doing": figures.doing,
        "workers": [_worker(worker, live=live) for worker in figures.workers],
        "members": [_member(member) for member in figures.members],
        "members_left_out": history.members.left_out,
        "last_digests": history.members.last_digests if live else {},
        "notes": [
            {"time": note.time, "kind": note.kind, "text": note.text}
            for note in history.notes.notes
            if live or note.time <= (until or 0)
        ][-200:],
        "samples": [
            {
                "time": sample.time,
                "worker": sample.worker,
                "step": sample.step,
                "prompt": sample.prompt,
                "text": sample.text,
            }
            for sample in history.samples
            if live or sample.time <= (until or 0)
        ][-20:],
        "parameters": history.parameters,
        "unigram_perplexity": history.unigram_perplexity,
        "summary": summary if live else None,
    }


def _worker(worker: WorkerFigures, *, live: bool) -> Json:
    started = worker.history.started
    ended = worker.history.ended
    names = ("device", "precision", "threads", "ranks", "workers")
    return {
        "worker": worker.number,
        "local": worker.local,
        "state": worker.state,
        "active": worker.active,
        "utilization": worker.utilization,
        "error": ended.error if ended is not None and live else None,
        **({} if started is None else {name: getattr(started, name) for name in names}),
        **worker.values,
    }


def _member(member: MemberFigures) -> Json:
    names = ("peer", "label", "link", "state", "since", "joined", "reason")
    return {"member": member.number} | {name: getattr(member, name) for name in names} | member.values


def _rounds(figures: RunFigures) -> Json:
    failed = [round_ for round_ in figures.rounds if round_.failure is not None]
    refused = [round_ for round_ in figures.rounds if round_.refused or round_.clipped]
    compared = [round_ for round_ in figures.rounds if round_.merged and round_.digests]
    unequal = [round_ for round_ in compared if len(round_.digests) > 1]
    last = figures.last_round
    straggler = figures.straggler
    return {
        "merged": figures.merged_rounds,
        "failed": figures.failed_rounds,
        "refused": figures.refused,
        "clipped": sum(len(round_.clipped) for round_ in figures.rounds),
        "last": None if last is None else round_json(last),
        "last_statistics": [] if last is None else _texts(last),
        "cosines": [] if last is None else last.cosines,
        "digests_compared": len(compared),
        "digests_unequal": [
            {"sequence": round_.sequence, "workers": round_.odd_workers, "merged": round_.merged}
            for round_ in unequal[-_LISTED:]
        ],
        "failures": [_failure(round_) for round_ in failed[-_LISTED:]],
        "refusals": [_refusal(round_) for round_ in refused[-_LISTED:]],
        "straggler": None if straggler is None else vars(straggler),
    }


def _failure(round_: RoundHistory) -> Json:
    failed_workers = [worker for worker, worker_round in round_.workers.items() if worker_round.failure is not None]
    return {
        "sequence": round_.sequence,
        "step": round_.step,
        "time": round_.time,
        "reason": round_.failure,
        "workers": sorted(failed_workers),
        "merged_by_others": round_.merged,
    }


def _refusal(round_: RoundHistory) -> Json:
    names = ("sequence", "step", "time", "refused", "clipped")
    return {name: getattr(round_, name) for name in names}


def _texts(round_: RoundHistory) -> list[str]:
    values = {name: value for name, value in round_.statistics.items() if value is not None}
    return [statistic.text(values[name]) for name, statistic in ROUND_STATISTICS.items() if name in values]


def round_json(round_: RoundHistory) -> Json:
    """Return a round with the part of each worker."""
    names = ("sequence", "fragment", "step", "time", "contributors", "refused", "clipped", "failure", "merged",
             "bytes_sent", "digests", "odd_workers", "cosine_low", "cosine_high", "straggler")  # fmt: skip
    workers = [_part(worker, round_.workers[worker]) for worker in sorted(round_.workers)]
    return {name: getattr(round_, name) for name in names} | round_.statistics | {"workers": workers}


def _part(worker: int, worker_round: WorkerRound) -> Json:
    names = ("started", "posted", "ended", "compute_seconds", "worked_seconds", "phases", "norm", "failure",
             "elsewhere")  # fmt: skip
    return {"worker": worker} | {name: getattr(worker_round, name) for name in names}


def _communication(figures: RunFigures) -> Json:
    """Compare the bytes of a worker with averaging fp32 gradients at every step, and with what its link carried."""
    sent = figures.bytes_sent
    baseline = figures.data_parallel_bytes
    link = figures.link_bytes_per_second
    seconds = max((worker.elapsed_seconds for worker in figures.local), default=0.0)
    return {
        "bytes_sent_per_worker": sent,
        "data_parallel_bytes_per_worker": baseline,
        "reduction": baseline / sent if sent else None,
        "workers": figures.usual_workers,
        "mean_bytes_per_second": sent / seconds if seconds else None,
        "data_parallel_bytes_per_second": figures.data_parallel_bytes_per_second,
        "link_bytes_per_second": link,
        "link_share": sent / seconds / link if link and seconds else None,
    }


def _status(figures: RunFigures, summary: Json | None, now: float) -> str:
    """Return complete, stopped, failed, training, silent (no event for a while), starting, or empty."""
    last = figures.history.clock.last
    until = figures.until
    if not figures.history.events:
        return "empty"
    local = [worker for worker in figures.workers if worker.local]
    running = "training" if any(worker.step for worker in local) else "starting"
    if until is not None and last is not None and until < last:
        return running
    if summary is not None and isinstance(summary.get("status"), str):
        return str(summary["status"])
    if local and not any(worker.active for worker in local):
        if all(worker.state == "failed" for worker in local):
            return "failed"
        ends = [worker.history.ended for worker in local]
        return "stopped" if any(end is not None and end.stopped_early for end in ends) else "complete"
    return "silent" if last is not None and now - last > SILENT_SECONDS else running
