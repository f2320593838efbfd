"""summary.json: a run in numbers, from its history alone.

Written for every end: complete, stopped by the user, or failed. A folder without it is a run that has not ended.
"""

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from diloco.atomic_files import write_file
from diloco.errors import ConfigError
from diloco.history.events import LossNotFiniteEvent, RoundMember, WorkerEndedEvent, WorkerFinishedEvent
from diloco.history.figures import RunFigures, data_parallel_bytes
from diloco.history.run_history import RunHistory, read_history
from diloco.training.config.run import RunConfig
from diloco.training.records.run_folder import RUN_FILE, how_to_end
from diloco.version import __version__

SUMMARY_FILE = "summary.json"
Summary = dict[str, Any]
_ADDED_LATER = frozenset(
    {
        "versions",
        "engine",
        "resyncs",
        "members_seen",
        "resolved",
        "rounds_dropped",
        "trainable_parameters",
        "round_statistics",
    }
)  # the summaries of earlier runs are read all the same


def summarize(config: RunConfig, history: RunHistory, error: str | None = None) -> Summary:
    """Return the numbers of a run, from the events so far; what a resume took back is not counted."""
    figures = RunFigures(history, elastic=config.elastic)
    started = history.started
    ends = [worker.ended for _, worker in sorted(history.workers.items()) if worker.ended is not None]
    spokesman = max(ends, key=lambda end: (isinstance(end, WorkerFinishedEvent), -end.worker), default=None)
    finished = isinstance(spokesman, WorkerFinishedEvent)
    if error is None and not config.elastic:  # in a swarm the others train on
        error = _bad_loss(history.latest_start.bad_loss)
    began = started is not None or spokesman is not None  # else, without an error: stopped before the first step
    if error is None and began and not finished:
        error = "no worker has come to the end"
    members = (spokesman.members if spokesman is not None else ()) or history.agreed
    steps = _steps(history, members)
    numbers = _numbers(config, history, members, steps)
    compared_steps = max(steps.values(), default=0)
    compared_workers = numbers["workers"]
    if config.elastic:
        numbers |= _swarm_numbers(history, spokesman)
        compared_steps = _steps_of_bytes(history)
        compared_workers = figures.usual_workers
    sent = numbers["bytes_sent_per_worker"]
    baseline = data_parallel_bytes(history.trainable_parameters, compared_steps, compared_workers)
    return {
        "status": "failed" if error else "stopped" if spokesman is None or spokesman.stopped_early else "complete",
        "error": error,
        "mode": config.mode,
        "model": config.model.name,
        "parameters": None if started is None else started.parameters,
        "trainable_parameters": history.trainable_parameters,
        "codec": config.sync.codec,
        **_validation(history),
        "unigram_perplexity": history.unigram_perplexity,
        "inner_steps": max(steps.values(), default=0),
        "num_inner_steps": config.sync.num_inner_steps if config.mode == "diloco" else 1,
        "rounds": figures.merged_rounds,
        "rounds_failed": figures.failed_rounds,
        "rounds_dropped": sum(end.rounds_dropped for end in ends),
        "round_statistics": figures.mean_statistics,
        "contributions_refused": 0 if spokesman is None else spokesman.contributions_refused,
        "checkpoints_failed": 0 if spokesman is None else spokesman.checkpoints_failed,
        "resumes": max(0, history.clock.starts - 1),
        "skipped_steps": sum(end.skipped_steps for end in ends),
        "data_parallel_bytes_per_worker": baseline,
        "communication_reduction": baseline / sent if sent else None,
        "engine": config.engine,
        "resyncs": sum(end.resyncs for end in ends),
        "versions": versions(),
        "seconds": history.clock.seconds() or 0.0,
        "resolved": dict(history.resolved),
    } | numbers


def _numbers(
    config: RunConfig, history: RunHistory, members: Sequence[RoundMember], steps: Mapping[int, int]
) -> Summary:
    """Return the numbers that a swarm counts otherwise: of all workers, from their reports and the log."""
    workers = config.workers if history.started is None else history.started.workers or config.workers
    reports = [member.report for member in members]
    reported_bytes = [report.bytes_sent or 0 for report in reports]
    logged_bytes = [worker.progress.bytes_sent for worker in (history.workers | history.left_out).values()]
    tokens = (sum(steps.values()) - history.steps_not_taken()) * history.tokens_per_step
    if config.sync.dynamic_steps and not config.elastic:  # positions in the schedule are not steps
        tokens = _own_tokens(history, members)
    return {
        "workers": workers,
        "members_seen": workers,
        "tokens": tokens,
        "bytes_sent_per_worker": max([*reported_bytes, *logged_bytes], default=0),
        "compute_utilization": _utilization([(report.sync_seconds, report.elapsed_seconds) for report in reports]),
        "anchor_digests": [member.anchor_digest for member in members],
        "training_seconds": max((report.elapsed_seconds or 0.0 for report in reports), default=0.0),
    }


def _swarm_numbers(history: RunHistory, spokesman: WorkerEndedEvent | None) -> Summary:
    """Return the numbers of a swarm's run on one machine, where workers come and go, and jump in the schedule.

    Bytes, seconds and the comparison with data-parallel training are of this machine's own workers and of the steps
    that they took themselves. `tokens` is of the whole swarm, and `local_tokens` of this machine's share in it: what is
    behind the contributions in the run's means (training/swarm/token_counts.py), the same on every machine.
    """
    work = history.own_work
    tokens = _swarm_tokens(history, spokesman)
    confirmed = () if spokesman is None else spokesman.confirmed
    digests = [member.anchor_digest for member in confirmed]
    if not digests and spokesman is not None:
        digests = [str(spokesman.anchor_digest)]
    most = max((tokens.get(worker, 0) for worker in work), default=0)
    rounds = history.rounds.by_sequence.values()
    return {
        "workers": len(confirmed) or max(1, len(history.roster)),
        "members_seen": max(1, len(tokens)),
        "tokens": sum(tokens.values()),
        "anchor_digests": digests,
        "local_workers": len(work),
        "local_steps": most // history.tokens_per_step if history.tokens_per_step else 0,
        "local_rounds": sum(not work.keys().isdisjoint(round_.contributors) for round_ in rounds),
        "local_tokens": sum(tokens.get(worker, 0) for worker in work),
        "bytes_sent_per_worker": max((done.bytes_sent for done in work.values()), default=0),
        "compute_utilization": _utilization([(done.sync_seconds, done.elapsed_seconds) for done in work.values()]),
        "training_seconds": max((done.elapsed_seconds for done in work.values()), default=0.0),
    }


def _swarm_tokens(history: RunHistory, spokesman: WorkerEndedEvent | None) -> dict[int, int]:
    """Return the tokens of each worker, as all members have counted them; in a run that was killed, or of an earlier
    version, as far as this machine has heard of them."""
    if spokesman is not None and spokesman.tokens_by_worker:
        return {int(worker): tokens for worker, tokens in spokesman.tokens_by_worker.items()}
    own = {worker: work.tokens for worker, work in history.own_work.items()}
    reported = {
        number: worker.most_tokens_told
        for number, worker in history.workers.items()
        if number not in own and worker.heard_of
    }
    return own | reported


def _steps_of_bytes(history: RunHistory) -> int:
    """Return the inner steps of this machine's busiest worker in all its starts, with those that are lost: it has sent
    bytes for them too."""
    most = max((work.tokens for work in history.own_work.values()), default=0)
    return most // history.tokens_per_step if history.tokens_per_step else 0


def _bad_loss(event: LossNotFiniteEvent | None) -> str | None:
    """Return why the latest start of a run has stopped, if a worker's loss was not finite."""
    return None if event is None else f"the loss of worker {event.worker} is {event.loss} at step {event.step}"


def versions() -> dict[str, str]:
    """Return the versions of diloco, torch and Python; torch is not imported for it."""
    return {"diloco": __version__, "torch": version("torch"), "python": platform.python_version()}


def _steps(history: RunHistory, members: Sequence[RoundMember]) -> dict[int, int]:
    """Return the inner steps of each worker, from its reports and the log."""
    steps = {member.worker: member.report.inner_steps or 0 for member in members}
    for number, worker in (history.workers | history.left_out).items():
        if worker.reached:
            steps[number] = max(steps.get(number, 0), worker.reached)
    return steps


def _own_tokens(history: RunHistory, members: Sequence[RoundMember]) -> int:
    """Return the sum of the tokens that each worker reports of itself."""
    tokens = {member.worker: member.report.tokens or 0 for member in members}
    for number, worker in history.local_workers.items():
        tokens[number] = max(tokens.get(number, 0), worker.progress.tokens)
    return sum(tokens.values())


def _validation(history: RunHistory) -> Summary:
    validations = history.validations
    first = validations.row(0)
    last = validations.row(-1)
    step = last["step"]
    return {
        "validation_loss": last["loss"],
        "validation_perplexity": last["perplexity"],
        "validation_step": None if step is None else int(step),
        "initial_validation_perplexity": first["perplexity"] if first["step"] == 0 else None,
    }


def _utilization(seconds: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Return the share of training time that was not spent on rounds, averaged over the workers: (rounds, all) of
    each."""
    shares = [1 - (rounds or 0.0) / elapsed for rounds, elapsed in seconds if elapsed]
    return statistics.fmean(shares) if shares else None


def write_summary(folder: Path, config: RunConfig, error: str | None = None) -> Summary:
    """Write the summary of a run folder's events into its summary.json, atomically."""
    summary = summarize(config, read_history(folder), error)
    write_file(folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return summary


def read_summary(folder: Path) -> Summary:
    """Return the summary of a run that has ended; raise ConfigError that says what is wrong with a folder that has
    none."""
    path = folder / SUMMARY_FILE
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: there is no such folder")
    if not path.exists():
        if not (folder / RUN_FILE).is_file():
            raise ConfigError(f"{folder} is not a run folder: it has neither {SUMMARY_FILE} nor {RUN_FILE}")
        raise ConfigError(f"{folder} has no {SUMMARY_FILE}: that run has not ended; {how_to_end(folder)}")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}): the run folder is damaged") from error
    expected = summarize(RunConfig(), RunHistory())
    for name in _ADDED_LATER & expected.keys():
        del expected[name]
    missing = sorted(expected.keys() - summary.keys()) if isinstance(summary, dict) else sorted(expected)
    if missing:
        raise ConfigError(f"{path} is not the summary of a run: it has no {', '.join(missing[:3])}")
    return cast(Summary, summary)


def perplexity_gap(run: Summary, baseline: Summary) -> float | None:
    """Return the relative difference in validation perplexity: positive if the run is worse than the baseline."""
    loss = run["validation_loss"]
    baseline_loss = baseline["validation_loss"]
    return None if loss is None or baseline_loss is None else math.expm1(loss - baseline_loss)
