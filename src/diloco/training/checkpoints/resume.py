"""Which checkpoint each worker resumes from: the states must belong together, and every byte is checked first.

Workers may be on machines that share no disk, so each lists its own checkpoints and they exchange the lists. All take
the latest moment that all have (manifests.py: a moment is a number of rounds), and each its own latest undamaged state
of it. If a worker has none, all take the moment before, with a warning. If none is left, nothing is removed and the run
does not start.

With k saved workers and another number now, worker i starts from the state of worker i mod k, and the shards are dealt
again; training/loop.py says what becomes of local work.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from diloco.data.order import ShardProgress
from diloco.errors import CheckpointError, ConfigError
from diloco.history.events import WorkerFinishedEvent
from diloco.history.run_history import read_history
from diloco.training.checkpoints.manifests import Checkpoint, Moment, find_checkpoints
from diloco.training.config.run import RunConfig

logger = logging.getLogger(__name__)

Gather = Callable[[bytes], list[bytes]]
"""Collective: the bytes of all ranks."""


@dataclass(frozen=True)
class Start:
    """The state from which a worker starts."""

    attempt: int = 1
    checkpoint: Checkpoint | None = None
    """None: start at the first step."""
    progress: Mapping[int, ShardProgress] | None = None
    """What has been read of all shards, if they are dealt again."""
    warnings: tuple[str, ...] = ()
    """What is damaged or missing."""

    @property
    def workers_before(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.moment.workers


@dataclass
class _OwnCheckpoints:
    """The checkpoints of this worker on its machine."""

    checkpoints: dict[Moment, list[Checkpoint]] = field(default_factory=dict)
    """Oldest first."""
    attempt: int = 0
    """The newest start of the run that saved one."""
    had_common: bool = False
    """Whether all workers have once had a checkpoint in common."""
    damage: list[str] = field(default_factory=list)

    def latest_good(self, moment: Moment) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest undamaged one, and what is damaged in newer ones. Reads every byte."""
        damage: list[str] = []
        for checkpoint in reversed(self.checkpoints[moment]):
            damaged_files = checkpoint.damage()
            if not damaged_files:
                return checkpoint, damage
            damage += map(str, damaged_files)
        return None, damage


def agree_on_start(run_folder: Path, worker: int, workers: int, gather: Gather) -> Start:
    """Return the start of this worker, which fits those of the others. Collective: every rank of a worker calls it."""
    own = _find_own(run_folder, worker)
    reports = _exchange(
        gather,
        {
            "moments": [list(moment) for moment in own.checkpoints],
            "attempt": own.attempt,
            "had_common": own.had_common,
            "damage": own.damage,
        },
    )
    warnings = [text for report in reports for text in report["damage"]]
    attempt = 1 + max(report["attempt"] for report in reports)
    common = set.intersection(*({Moment(*moment) for moment in report["moments"]} for report in reports))
    for moment in sorted(common, reverse=True):
        checkpoint, damage = own.latest_good(moment)
        answers = _exchange(gather, {"damage": damage, "good": checkpoint is not None})
        warnings += [text for answer in answers for text in answer["damage"]]
        if checkpoint is not None and all(answer["good"] for answer in answers):
            if moment.workers == workers:
                return Start(attempt, checkpoint, None, tuple(dict.fromkeys(warnings)))
            progress, older = _saved_progress(run_folder, moment, gather)
            return Start(attempt, checkpoint, progress, tuple(dict.fromkeys(warnings + older)))
    finished = max(answer["finished"] for answer in _exchange(gather, {"finished": _finished_steps(run_folder)}))
    _check_may_start_again(run_folder, any(report["had_common"] for report in reports), finished, warnings)
    return Start(attempt)


def newest_start(run_folder: Path) -> Start:
    """Return the newest undamaged checkpoint of any worker on this machine, for the first worker of a swarm that
    resumes.

    The other workers join it and get its state.
    """
    complete, damage = find_checkpoints(run_folder)
    warnings = [str(file) for file in damage]
    attempt = 1 + max((checkpoint.moment.attempt for checkpoint in complete), default=0)
    for checkpoint in sorted(complete, key=_newest_last, reverse=True):
        damaged_files = checkpoint.damage()
        if not damaged_files:
            return Start(attempt, checkpoint, None, tuple(warnings))
        warnings += map(str, damaged_files)
    _check_may_start_again(run_folder, False, _finished_steps(run_folder), warnings)
    return Start(attempt)


def _newest_last(checkpoint: Checkpoint) -> tuple[int, int, int]:
    return checkpoint.moment.rounds, checkpoint.step, -checkpoint.worker


def check_resumable(run_folder: Path, workers: Iterable[int], config: RunConfig, corpus_digest: str) -> None:
    """Refuse what these workers would refuse, by the manifests alone, before anything in the run folder is changed."""
    own = [_find_own(run_folder, worker) for worker in workers]
    common = set.intersection(*(set(worker.checkpoints) for worker in own))
    if not common:
        damage = [text for worker in own for text in worker.damage]
        had_common = any(worker.had_common for worker in own)
        _check_may_start_again(run_folder, had_common, _finished_steps(run_folder), damage)
        return
    for worker in own:
        checkpoint = worker.checkpoints[max(common)][-1]
        model = str(checkpoint.manifests[0].config["model"])  # which no option can change
        check_same_run(checkpoint, config.lasting(corpus_digest, model))
        check_steps(checkpoint, config.steps)


def _exchange(gather: Gather, report: Mapping[str, Any]) -> list[Any]:
    """Return the reports of all ranks. Collective."""
    return [json.loads(data) for data in gather(json.dumps(report).encode())]


def _find_own(run_folder: Path, worker: int) -> _OwnCheckpoints:
    """Return this worker's checkpoints by moment; those of worker i mod k where there were k workers."""
    complete, damage = find_checkpoints(run_folder)
    own = _OwnCheckpoints(damage=[str(file) for file in damage])
    for checkpoint in complete:
        manifest = checkpoint.manifests[0]
        own.attempt = max(own.attempt, checkpoint.moment.attempt)
        own.had_common = own.had_common or manifest.common_step > 0
        if checkpoint.worker == worker % checkpoint.moment.workers:
            own.checkpoints.setdefault(checkpoint.moment, []).append(checkpoint)
    return own


def _finished_steps(run_folder: Path) -> int:
    """Return the steps of the workers that ended regularly: at their last step, or at a stop."""
    ends = [worker.ended for worker in read_history(run_folder).local_workers.values()]
    return max((end.inner_steps for end in ends if isinstance(end, WorkerFinishedEvent)), default=0)


def _check_may_start_again(run_folder: Path, had_common: bool, finished: int, warnings: list[str]) -> None:
    """Let a run that was killed before its first checkpoint start again at step 0.

    A run that has lost its checkpoints does not, nor one that ended without any.
    """
    if warnings or had_common:
        reason = "; ".join(dict.fromkeys(warnings)) or "the workers have no moment in common"
        raise CheckpointError(
            f"{run_folder} has no checkpoint that all workers can resume from ({reason}). Nothing was removed: restore "
            f"the files, or remove {run_folder / 'checkpoints'} on every machine to start again at the first step"
        )
    if finished:
        raise CheckpointError(
            f"{run_folder} has ended after {finished} inner steps and has no checkpoint that all workers can "
            "resume from: to start again at the first step would replace its model. Start a new run instead (with "
            "checkpoint.interval = 0 none is saved)"
        )


def check_steps(checkpoint: Checkpoint, steps: int) -> None:
    """Refuse a last step before the checkpoint's."""
    if checkpoint.step > steps:
        raise ConfigError(
            f"steps = {steps}, but {checkpoint.folder} is at step {checkpoint.step} already: give --steps at least that"
        )


def check_same_run(checkpoint: Checkpoint, lasting: Mapping[str, Any]) -> None:
    """Refuse to resume with another value of what must stay the same (`RunConfig.lasting`)."""
    saved = checkpoint.manifests[0].config
    now = json.loads(json.dumps(dict(lasting)))
    other = [key for key in sorted(saved.keys() | now.keys()) if saved.get(key) != now.get(key)]
    if other == ["model"]:
        parts = differing_parts(saved["model"], now["model"])
        raise ConfigError(
            f"{checkpoint.folder} was saved with another model ({parts} differ): "
            "a run keeps what it began with; restore the model's folder, or start a new run"
        )
    if other:
        key = other[0]
        raise ConfigError(
            f"{checkpoint.folder} was saved with {key} = {saved.get(key)!r}, and the run now has {now.get(key)!r}: a "
            f"run keeps what it began with ({', '.join(other)} differ); start a new run to change it"
        )


def differing_parts(saved: str, now: str) -> str:
    """Return in what two models' descriptions differ: the keys, if they are JSON objects with some in common."""
    try:
        before = json.loads(saved)
        after = json.loads(now)
        keys = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    except (ValueError, AttributeError):  # our own transformer describes itself in other words
        return f"{saved} and {now}"
    return ", ".join("the frozen weights" if key == "frozen" else key for key in keys)


class _ReadPosition(NamedTuple):
    """The position in a shard that one checkpoint tells; of several for a shard the greatest counts."""

    of_this_moment: bool
    moment: Moment
    step: int
    worker: int
    progress: ShardProgress


def _saved_progress(run_folder: Path, moment: Moment, gather: Gather) -> tuple[dict[int, ShardProgress], list[str]]:
    """Return how far each shard had been read, by the checkpoints of all machines, and warnings. Collective.

    If a worker has no checkpoint of this moment, its newest counts: skipping a little is better than repeating much.
    """
    local: dict[int, _ReadPosition] = {}
    for checkpoint in find_checkpoints(run_folder)[0]:
        for shard, read in checkpoint.manifests[0].state["also"]["reading"]["progress"].items():
            position = _ReadPosition(
                checkpoint.moment == moment, checkpoint.moment, checkpoint.step, checkpoint.worker, ShardProgress(*read)
            )
            local[int(shard)] = max(local.get(int(shard), position), position)
    latest: dict[int, _ReadPosition] = {}
    for machine in _exchange(gather, {"shards": list(local.items())}):
        for shard, (of_this, when, step, worker, read) in machine["shards"]:
            position = _ReadPosition(of_this, Moment(*when), step, worker, ShardProgress(*read))
            latest[shard] = max(latest.get(shard, position), position)
    older = Counter((read.worker, read.step) for read in latest.values() if not read.of_this_moment)
    notes = [
        f"worker {worker} has no checkpoint of this moment here: {count} shards are read on from step {step}, its "
        "newest one"
        for (worker, step), count in sorted(older.items())
    ]
    return {shard: read.progress for shard, read in latest.items()}, notes
