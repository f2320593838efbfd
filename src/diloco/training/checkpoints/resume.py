"""From which checkpoint the workers go on: all must take states that belong together, and every byte is checked first.

Workers may be on machines that share nothing, so each looks at what it has itself, and they tell each other. They take
the latest moment that all have (manifests.py says why a moment is a number of rounds), and in it each takes its own
latest good state. If a worker has none, all take the moment before, and say so. If nothing is left, nothing is removed
and the run does not start.

With another number of workers than were saved, worker i starts from the state of worker i mod k, and the progress of
the data is shared out anew; training/loop.py says what becomes of local work.
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
from diloco.training.checkpoints.manifests import Checkpoint, Moment, find_checkpoints
from diloco.training.config.run import RunConfig
from diloco.training.records.events import read_events
from diloco.training.records.history import current

logger = logging.getLogger(__name__)

Gather = Callable[[bytes], list[bytes]]
"""Collective: everyone's bytes."""


@dataclass(frozen=True)
class Start:
    """Where a worker begins."""

    attempt: int = 1
    checkpoint: Checkpoint | None = None
    """None: at the first step."""
    progress: Mapping[int, ShardProgress] | None = None
    """What has been read of all shards, if they are to be shared out anew."""
    warnings: tuple[str, ...] = ()
    """What was found damaged, or not found."""

    @property
    def workers_before(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.moment.workers


@dataclass
class _Here:
    """What this worker has on its machine."""

    checkpoints: dict[Moment, list[Checkpoint]] = field(default_factory=dict)
    """Oldest first."""
    attempt: int = 0
    had_common: bool = False
    damage: list[str] = field(default_factory=list)

    def latest_good(self, moment: Moment) -> tuple[Checkpoint | None, list[str]]:
        """Reads every byte; and what is wrong with those that are not good."""
        damage: list[str] = []
        for checkpoint in reversed(self.checkpoints[moment]):
            found = checkpoint.damage()
            if not found:
                return checkpoint, damage
            damage += map(str, found)
        return None, damage


def agree_on_start(run_folder: Path, worker: int, workers: int, gather: Gather) -> Start:
    """Collective: the start that all workers take. Every rank of a worker calls it."""
    here = _look(run_folder, worker)
    told = _exchange(
        gather,
        {
            "moments": [list(moment) for moment in here.checkpoints],
            "attempt": here.attempt,
            "had_common": here.had_common,
            "damage": here.damage,
        },
    )
    warnings = [text for one in told for text in one["damage"]]
    attempt = 1 + max(one["attempt"] for one in told)
    common = set.intersection(*({Moment(*moment) for moment in one["moments"]} for one in told))
    for moment in sorted(common, reverse=True):
        checkpoint, damage = here.latest_good(moment)
        found = _exchange(gather, {"damage": damage, "good": checkpoint is not None})
        warnings += [text for one in found for text in one["damage"]]
        if checkpoint is not None and all(one["good"] for one in found):
            if moment.workers == workers:
                return Start(attempt, checkpoint, None, tuple(dict.fromkeys(warnings)))
            progress, older = _progress(run_folder, moment, gather)
            return Start(attempt, checkpoint, progress, tuple(dict.fromkeys(warnings + older)))
    finished = max(one["finished"] for one in _exchange(gather, {"finished": _finished_steps(run_folder)}))
    _refuse_to_begin_again(run_folder, any(one["had_common"] for one in told), finished, warnings)
    return Start(attempt)


def newest_start(run_folder: Path) -> Start:
    """In a swarm whoever is the first to come back goes on from the newest good checkpoint of this machine, whichever
    of its workers wrote it; the others come to it."""
    complete, damage = find_checkpoints(run_folder)
    warnings = [str(one) for one in damage]
    attempt = 1 + max((checkpoint.moment.attempt for checkpoint in complete), default=0)
    for checkpoint in sorted(complete, key=lambda one: (one.moment.rounds, one.step, -one.worker), reverse=True):
        found = checkpoint.damage()
        if not found:
            return Start(attempt, checkpoint, None, tuple(warnings))
        warnings += map(str, found)
    _refuse_to_begin_again(run_folder, False, _finished_steps(run_folder), warnings)
    return Start(attempt)


def check_resumable(run_folder: Path, workers: Iterable[int], config: RunConfig, corpus_digest: str) -> None:
    """Before anything in the run folder is changed: refuse what these workers would refuse, by the manifests here."""
    here = [_look(run_folder, worker) for worker in workers]
    common = set.intersection(*(set(one.checkpoints) for one in here))
    if not common:
        damage = [text for one in here for text in one.damage]
        had_common = any(one.had_common for one in here)
        _refuse_to_begin_again(run_folder, had_common, _finished_steps(run_folder), damage)
        return
    for one in here:
        checkpoint = one.checkpoints[max(common)][-1]
        model = str(checkpoint.manifests[0].config["model"])  # which no option can change
        check_same_run(checkpoint, config.lasting(corpus_digest, model))
        check_steps(checkpoint, config.steps)


def _exchange(gather: Gather, mine: Mapping[str, Any]) -> list[Any]:
    return [json.loads(data) for data in gather(json.dumps(mine).encode())]


def _look(run_folder: Path, worker: int) -> _Here:
    """This worker's checkpoints by moment."""
    complete, damage = find_checkpoints(run_folder)
    here = _Here(damage=[str(one) for one in damage])
    for checkpoint in complete:
        manifest = checkpoint.manifests[0]
        here.attempt = max(here.attempt, checkpoint.moment.attempt)
        here.had_common = here.had_common or manifest.common_step > 0
        if checkpoint.worker == worker % checkpoint.moment.workers:
            here.checkpoints.setdefault(checkpoint.moment, []).append(checkpoint)
    return here


def _finished_steps(run_folder: Path) -> int:
    """How far the workers had come that ended by themselves: at their last step, or at a stop."""
    ended = [event for event in current(read_events(run_folder)) if event["type"] == "worker_finished"]
    return max((event["inner_steps"] for event in ended), default=0)


def _refuse_to_begin_again(run_folder: Path, had_common: bool, finished: int, warnings: list[str]) -> None:
    """A run that was killed before its first checkpoint begins again; one that has lost its checkpoints does not, nor
    one that has ended without any."""
    if warnings or had_common:
        found = "; ".join(dict.fromkeys(warnings)) or "no moment is there on all workers"
        raise CheckpointError(
            f"{run_folder} has no checkpoint that all workers can go on from ({found}). Nothing was removed: restore "
            f"the files, or remove {run_folder / 'checkpoints'} on every machine to begin again at the first step"
        )
    if finished:
        raise CheckpointError(
            f"{run_folder} has ended after {finished} inner steps and has no checkpoint that all workers can go on "
            "from: to begin again at the first step would replace its model. Start a new run instead (with "
            "checkpoint.interval = 0 none is saved)"
        )


def check_steps(checkpoint: Checkpoint, steps: int) -> None:
    """Refuse an end that lies behind."""
    if checkpoint.step > steps:
        raise ConfigError(
            f"steps = {steps}, but {checkpoint.folder} is at step {checkpoint.step} already: give --steps more"
        )


def check_same_run(checkpoint: Checkpoint, lasting: Mapping[str, Any]) -> None:
    """Refuse what would make another run of it."""
    saved, now = checkpoint.manifests[0].config, json.loads(json.dumps(dict(lasting)))
    other = [key for key in sorted(saved.keys() | now.keys()) if saved.get(key) != now.get(key)]
    if other:
        key = other[0]
        raise ConfigError(
            f"{checkpoint.folder} was saved with {key} = {saved.get(key)!r}, and the run now has {now.get(key)!r}: a "
            f"run goes on with what it began with ({', '.join(other)} differ); start a new run for another"
        )


class _Read(NamedTuple):
    """What a checkpoint tells of a shard; the greater one is to be believed."""

    of_this_moment: bool
    moment: Moment
    step: int
    worker: int
    progress: ShardProgress


def _progress(run_folder: Path, moment: Moment, gather: Gather) -> tuple[dict[int, ShardProgress], list[str]]:
    """What all the saved workers had read, also those that are gone, as far as any machine here knows it.

    Of a worker that has no checkpoint of this moment its newest counts: to skip a little is better than to repeat much.
    Also returns what is to be said of that.
    """
    mine: dict[int, _Read] = {}
    for one in find_checkpoints(run_folder)[0]:
        for shard, read in one.manifests[0].state["also"]["reading"]["progress"].items():
            told = _Read(one.moment == moment, one.moment, one.step, one.worker, ShardProgress(*read))
            mine[int(shard)] = max(mine.get(int(shard), told), told)
    latest: dict[int, _Read] = {}
    for machine in _exchange(gather, {"shards": list(mine.items())}):
        for shard, (here, when, step, worker, read) in machine["shards"]:
            told = _Read(here, Moment(*when), step, worker, ShardProgress(*read))
            latest[shard] = max(latest.get(shard, told), told)
    older = Counter((read.worker, read.step) for read in latest.values() if not read.of_this_moment)
    notes = [
        f"worker {worker} has no checkpoint of this moment here: {count} shards go on from what it had read at step "
        f"{step}, in its newest one"
        for (worker, step), count in sorted(older.items())
    ]
    return {shard: read.progress for shard, read in latest.items()}, notes
