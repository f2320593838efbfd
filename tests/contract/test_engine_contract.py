"""What every engine promises (engines/base.py), held against each engine with the same scenarios.

A scenario is a function of an engine. `local` runs it in threads; `torch_distributed` in real processes, where all
scenarios share one world per number of workers, since starting one is slow; `swarm` in threads with a real sidecar
each, in one swarm that the workers leave one after another; `bucket` likewise, in one shared folder.

A swarm is different in what rests on a fixed membership, and so is a bucket. Bytes are counted otherwise, and a worker
that does not fit in (another model, another round) is told so alone: the others go on without it.
"""

import functools
import itertools
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import CODECS, codec
from diloco.core.config import FEWEST_TO_MERGE, FaultsConfig, SyncConfig
from diloco.core.fragments import PartLayout
from diloco.core.merging import cosines
from diloco.core.outer_optimizers import Nesterov
from diloco.core.rates import Course, LearningRateCurve
from diloco.engines import reduction
from diloco.engines.base import Engine
from diloco.engines.header import HEADER_BYTES
from diloco.engines.rounds import GlobalState, Report, RoundKey, RoundPhases
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.errors import EngineError, RoundFailed
from support.bucket import LoopbackBucket
from support.problem import Story, train
from support.processes import in_processes
from support.rounds import NUMEL, average, contribution, decoded, message, plain_mean, values
from support.swarm.engines import ElasticWorkers, LoopbackSwarm, Shifted, together
from support.threads import in_threads

FEWEST_TO_CLIP = FEWEST_TO_MERGE["clipped"]
Scenario = Callable[[Engine], Any]


# Scenarios: what one worker does; the tests below judge what all of them saw


def every_codec(engine: Engine) -> dict[str, bytes]:
    return {
        name: average(engine, sequence, name=name).mean.data.numpy().tobytes() for sequence, name in enumerate(CODECS)
    }


def weighted(engine: Engine) -> tuple[list[float], float, tuple[int, ...]]:
    result = average(engine, weight=float(engine.worker + 1))
    return decoded(result), result.total_weight, result.contributors


def one_without_work(engine: Engine) -> tuple[list[float], float, tuple[int, ...], dict[int, str]]:
    result = average(engine, weight=0.0 if engine.worker == 0 else 2.0)
    return decoded(result), result.total_weight, result.contributors, dict(result.refused)


def one_refused(engine: Engine, odd: float) -> tuple[list[float], float, tuple[int, ...], dict[int, str]]:
    tensor = values(engine.worker)
    if engine.worker == 1:
        tensor[5] = odd
    result = average(engine, tensor=tensor)
    return decoded(result), result.total_weight, result.contributors, dict(result.refused)


def nan_refused(engine: Engine) -> Any:
    return one_refused(engine, math.nan)


def absurd_clipped(engine: Engine) -> tuple[bytes, tuple[int, ...], dict[int, str]]:
    """Worker 1's contribution is longer than 1000 times the median."""
    result = average(engine, tensor=values(engine.worker) * (1e6 if engine.worker == 1 else 1.0))
    return result.mean.data.numpy().tobytes(), result.contributors, dict(result.clipped)


def clipped(engine: Engine) -> tuple[bytes, str]:
    """As four and more do it; a sidecar, a process of its own, keeps to four."""
    FEWEST_TO_MERGE["clipped"] = 2
    try:
        posted = replace(contribution(engine, name="int8", weight=1.0 + engine.worker), merge="clipped")
        result = engine.start_round(RoundKey(0, 0), posted, 60.0).wait()
    finally:
        FEWEST_TO_MERGE["clipped"] = FEWEST_TO_CLIP
    return result.mean.data.numpy().tobytes(), result.merge


def one_turned_around(engine: Engine) -> tuple[dict[int, float], int]:
    """Worker 2's contribution points against the others' in its first 5 parts, and is nothing in the sixth."""
    tensor, part = 1.0 + values(engine.worker) / (engine.worker + 1), PartLayout(NUMEL).part_elements
    if engine.worker == 2:
        tensor[: 5 * part] *= -1
        tensor[5 * part : 6 * part] = 0
    posted = replace(contribution(engine, tensor=tensor), merge="clipped")
    result = engine.start_round(RoundKey(0, 0), posted, 60.0).wait()
    return result.replaced, result.comparison.parts


def all_refused(engine: Engine) -> tuple[str, list[float]]:
    """The failed round, and that the next one is fine."""
    bad = torch.full((NUMEL,), math.nan)
    reason = message(lambda: average(engine, 0, tensor=bad), RoundFailed)
    return reason, decoded(average(engine, 1))


def all_refused_says_who_stops(engine: Engine) -> tuple[bool, bool]:
    return _all_refused_with(engine, Report(stopping=engine.worker == 0))


def all_refused_says_that_all_are_done(engine: Engine) -> tuple[bool, bool]:
    return _all_refused_with(engine, Report(done=True))


def _all_refused_with(engine: Engine, report: Report) -> tuple[bool, bool]:
    with pytest.raises(RoundFailed) as caught:
        average(engine, tensor=torch.full((NUMEL,), math.nan), report=report)
    return caught.value.stopping, caught.value.resync


def no_work(engine: Engine) -> tuple[float, tuple[int, ...], dict[int, str], int]:
    result = average(engine, weight=0.0)
    return result.total_weight, result.contributors, dict(result.refused), result.bytes_sent


def other_anchor(engine: Engine) -> tuple[tuple[int, ...], dict[int, str], bool]:
    last = engine.worker == engine.workers - 1
    result = average(engine, anchor="odd" if last else "same")
    return result.contributors, dict(result.refused), result.resync


def tiny(engine: Engine) -> list[float]:
    return decoded(average(engine, numel=3))


def members(engine: Engine) -> list[tuple[int, str, int, float]]:
    result = average(engine, report=Report(inner_steps=10 + engine.worker, loss=0.5))
    assert engine.members() == result.members
    return [(m.worker, m.anchor_digest, m.report.inner_steps, m.report.loss) for m in engine.members()]


def alike(engine: Engine) -> list[tuple[int, int, float]]:
    result = average(engine, name="int8", weight=1.0 + engine.worker)
    return cosines(result.contributors, result.comparison.products)


def traffic(engine: Engine) -> tuple[int, int]:
    result = average(engine, name="int8")
    return result.bytes_sent, result.bytes_received


def sparse_traffic(engine: Engine) -> tuple[int, int]:
    result = average(engine, name="topk")
    return result.bytes_sent, result.bytes_received


def phases(engine: Engine) -> tuple[RoundPhases, float]:
    """What the engine tells of a round's seconds, and those that passed."""
    started = time.monotonic()
    result = average(engine)
    return result.phases, time.monotonic() - started


def patient(engine: Engine) -> tuple[int, ...]:
    """Worker 0 waits longer than the round's deadline, and than its group's, for the others, which are late."""
    limited = isinstance(engine, TorchDistributedEngine) and engine.workers > 1
    if limited:
        _set_pg_timeout(timedelta(seconds=0.2), engine._groups.control)  # type: ignore[attr-defined]
    if engine.worker:
        time.sleep(0.6)
        result = average(engine, weight=0.0)
    else:
        waits = replace(contribution(engine, weight=0.0), patience_seconds=60.0)
        result = engine.start_round(RoundKey(0, 0), waits, 0.01).wait()
    if limited:
        _set_pg_timeout(timedelta(seconds=100.0), engine._groups.control)  # type: ignore[attr-defined]
    return tuple(member.worker for member in result.members)


def other_layout(engine: Engine) -> str:
    layout = "odd" if engine.worker == 1 else "same"
    return message(lambda: average(engine, layout=layout), EngineError)


def other_round(engine: Engine) -> str:
    fragment = 1 if engine.worker == 1 else 0
    pending = engine.start_round(RoundKey(0, fragment), contribution(engine), 20.0)
    return message(pending.wait, EngineError)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        every_codec,
        weighted,
        one_without_work,
        nan_refused,
        absurd_clipped,
        clipped,
        all_refused,
        all_refused_says_who_stops,
        all_refused_says_that_all_are_done,
        no_work,
        other_anchor,
        tiny,
        members,
        alike,
        traffic,
        sparse_traffic,
        phases,
        patient,
        other_layout,
        other_round,
    )
}
BREAKING = {"other_layout", "other_round"}  # afterwards the engine is of no use, as it should be
SWARM = [name for name in SCENARIOS if name not in BREAKING and name != "patient"]


def in_one_world(engine: TorchDistributedEngine) -> dict[str, Any]:
    answers = {}
    for name, scenario in SCENARIOS.items():
        if name in BREAKING and engine.workers == 1:
            continue
        own = TorchDistributedEngine(timeout_seconds=20.0) if name in BREAKING else engine
        answers[name] = scenario(own)
    return answers


def in_one_swarm(swarm: ElasticWorkers, first: int) -> tuple[list[dict[str, Any]], int]:
    """All scenarios by all workers, and the round after them."""
    everyone: list[dict[str, Any]] = [{} for _ in swarm.engines]
    for name in SWARM:
        engines = [Shifted(engine, first) for engine in swarm.engines]
        for engine in engines:
            engine.serve_state(lambda: GlobalState({}, {"sequence": 0}, "same"))
        taken = together(engines, lambda engine: engine.fetch_state() is not None)
        if any(taken):  # it had joined just now, or diverged
            swarm.settle()
        for answered, answer in zip(everyone, together(engines, SCENARIOS[name]), strict=True):
            answered[name] = answer
        first += engines[0].rounds
    return everyone, first


@dataclass
class Told:
    """What one swarm, or the workers of one bucket, did: answers by the number of workers, calm runs, a worker that was
    lost."""

    answers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    calm: list[list[Story]] = field(default_factory=list)
    after_loss: list[Any] = field(default_factory=list)
    apart: list[Story] = field(default_factory=list)


MOST_ATTEMPTS = 3  # at a round, on a busy machine
VARYING: dict[str, Any] = {
    "learning_rates": LearningRateCurve(0.01, 14),
    "outer": Nesterov(course=Course(2, start_momentum=0.1, final_lr=0.3, plain_rounds=1, rounds=4)),
    "faults": FaultsConfig(0.3, seed=1),
}
CALM: list[tuple[SyncConfig, int, dict[str, Any]]] = [
    (SyncConfig(4, "int8", fragments=2, overlap_steps=1), 14, {}),  # they join, and start from worker 0's parameters
    (SyncConfig(3, "fp16", outer_overlap="eager"), 8, {"seed": 0}),
    (SyncConfig(3, "topk"), 8, {"seed": 0}),  # they hold a state already
    (SyncConfig(3, "int8", fragments=2, overlap_steps=1, growth=0.018), 14, {"seed": 0, **VARYING}),
    (SyncConfig(3, "fp16", fragments=2, second_moment_every=2), 11, {"seed": 0}),
    (SyncConfig(6, "int8", fragments=2, overlap_steps=1, dynamic_steps=True), 18, {"seed": 0, "seconds": (1, 3, 1.5)}),
]
CALM_NAMES = ["joined", "eager", "topk", "varying, drops", "second moments", "dynamic steps"]


PLAIN, APART = SyncConfig(6, "fp32"), (23, 11)


@functools.cache
def swarm() -> Told:
    """Three workers join, train, answer; then they leave one by one, and the others answer again."""
    world, first, told = LoopbackSwarm(3), 0, Told()
    for sync, steps, options in CALM:
        stories, first = world.train(sync, steps, first, **options)
        told.calm.append([story.without_mean() for story in stories])
    for workers in (3, 2, 1):
        told.answers[workers], first = in_one_swarm(world, first)
        if workers == 2:
            world.lose_p2pd(1)
            told.after_loss = together([Shifted(engine, first) for engine in world.engines], weighted)
            first += 1
            told.apart, first = world.train(PLAIN, APART, first, seed=0)  # the one with fewer steps leaves
        else:
            world.leave()
    world.close()
    return told


@functools.cache
def bucket() -> Told:
    """The same as in a swarm, in a shared folder."""
    told = Told()
    with LoopbackBucket(3) as world:
        first = 0
        for sync, steps, options in CALM:
            stories, first = world.train(sync, steps, first, **options)
            told.calm.append([story.without_mean() for story in stories])
        for workers in (3, 2, 1):
            told.answers[workers], first = in_one_swarm(world, first)
            if workers == 2:
                told.apart, first = world.train(PLAIN, APART, first, seed=0)
            else:
                world.leave()
    return told


ELASTIC = {"swarm": swarm, "bucket": bucket}
_worlds: dict[int, list[dict[str, Any]]] = {}


def answers(engine: str, workers: int, name: str) -> list[Any]:
    """What each worker answered in a scenario."""
    if engine == "local":
        return in_threads(workers, SCENARIOS[name])
    if engine in ELASTIC:
        return [world[name] for world in ELASTIC[engine]().answers[workers]]
    if workers not in _worlds:
        _worlds[workers] = in_processes(workers, in_one_world)
    return [world[name] for world in _worlds[workers]]


def equal(everyone: list[Any]) -> Any:
    """The one answer that all workers gave."""
    assert all(answer == everyone[0] for answer in everyone), "the workers saw different things"
    return everyone[0]


FIXED = ["local", pytest.param("torch_distributed", marks=pytest.mark.slow)]
over_engines = pytest.mark.parametrize(
    "engine", [*FIXED, *(pytest.param(name, marks=pytest.mark.slow) for name in ELASTIC)], scope="module"
)
over_fixed_engines = pytest.mark.parametrize("engine", FIXED, scope="module")
over_workers = pytest.mark.parametrize("workers", [1, 2, 3], scope="module")
several_workers = pytest.mark.parametrize("workers", [2, 3], scope="module")


@over_engines
@over_workers
def test_i1_all_workers_get_the_same_bits_with_every_codec(engine: str, workers: int) -> None:
    means = equal(answers(engine, workers, "every_codec"))
    assert means.keys() == CODECS.keys()
    vector = EncodedVector(codec("fp32"), PartLayout(NUMEL))
    vector.data = torch.frombuffer(bytearray(means["fp32"]), dtype=torch.uint8).view(vector.data.shape)
    assert torch.equal(vector.decode(0, vector.layout.num_parts), plain_mean(*range(workers)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch_distributed", *ELASTIC])
@over_workers
def test_i8_all_engines_give_the_same_bytes_with_every_codec(workers: int, engine: str) -> None:
    assert equal(answers("local", workers, "every_codec")) == equal(answers(engine, workers, "every_codec"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", list(ELASTIC))
@pytest.mark.parametrize("run", range(len(CALM)), ids=CALM_NAMES)
def test_i8_calm_elastic_workers_have_the_local_engines_trajectory_bit_for_bit(run: int, engine: str) -> None:
    sync, steps, options = CALM[run]
    local = in_threads(3, lambda engine: train(engine, sync, steps, **options).without_mean())
    for mine, theirs in zip(ELASTIC[engine]().calm[run], local, strict=True):
        assert replace(mine, bytes_sent=0) == replace(theirs, bytes_sent=0)
        assert len(set(mine.digests)) > 2 and mine.steps == steps
    taken = [len(one.losses) for one in local]
    assert (len(set(taken)) > 1) == sync.dynamic_steps, f"all take as many steps, unless they are dynamic: {taken}"


@pytest.mark.slow
def test_a_worker_whose_p2pd_was_killed_is_in_the_swarm_again_under_its_number() -> None:
    mean, total, contributors = equal(swarm().after_loss)
    assert (total, contributors) == (3.0, (0, 1)) and len(mean) == NUMEL


@pytest.mark.slow
@pytest.mark.parametrize("engine", list(ELASTIC))
def test_an_elastic_loop_with_fewer_steps_leaves_with_its_work_in_the_mean_and_the_other_goes_on(engine: str) -> None:
    long, short = ELASTIC[engine]().apart
    assert (long.steps, short.steps) == APART
    assert [result.total_weight for result in long.results] == [12.0, 6.0 + 5.0, 6.0, 5.0]
    assert short.digests[-1] in long.digests[:-1]
    assert long.member_digests == (long.digests[-1],)


@over_engines
@over_workers
def test_the_mean_is_weighted_and_the_divisor_is_the_total_weight(engine: str, workers: int) -> None:
    mean, total, contributors = equal(answers(engine, workers, "weighted"))
    assert total == sum(range(1, workers + 1)) and contributors == tuple(range(workers))
    expected = sum((w + 1) * values(w).double() for w in range(workers)) / total
    torch.testing.assert_close(torch.tensor(mean).double(), expected, rtol=1e-5, atol=1e-6)


@over_engines
@several_workers
def test_a_worker_without_work_is_neither_in_the_mean_nor_refused(engine: str, workers: int) -> None:
    mean, total, contributors, refused = equal(answers(engine, workers, "one_without_work"))
    assert (total, contributors, refused) == (2.0 * (workers - 1), tuple(range(1, workers)), {})
    assert mean == plain_mean(*range(1, workers)).tolist()


@over_engines
@several_workers
def test_a_bad_contribution_is_refused_and_the_mean_of_the_others_is_exact(engine: str, workers: int) -> None:
    mean, total, contributors, refused = equal(answers(engine, workers, "nan_refused"))
    sound = tuple(worker for worker in range(workers) if worker != 1)
    assert (total, contributors, refused.keys()) == (workers - 1, sound, {1})
    assert "not finite" in refused[1]
    assert mean == plain_mean(*sound).tolist()


@over_engines
@several_workers
def test_a_contribution_that_is_too_long_is_scaled_to_the_same_bits_by_every_engine(engine: str, workers: int) -> None:
    mean, contributors, clipped = equal(answers(engine, workers, "absurd_clipped"))
    assert contributors == tuple(range(workers)) and clipped.keys() == {1}
    assert mean == answers("local", workers, "absurd_clipped")[0][0]


@over_fixed_engines
@several_workers
def test_a_clipped_mean_has_the_same_bits_with_every_engine(engine: str, workers: int) -> None:
    mean, merge = equal(answers(engine, workers, "clipped"))
    assert merge == "clipped" and mean == answers("local", workers, "clipped")[0][0]


@over_fixed_engines
def test_all_workers_are_told_in_what_share_of_the_parts_each_contribution_was_replaced(engine: str) -> None:
    """Of a swarm: tests/unit/swarm/test_swarm_rounds.py, with four workers in memory."""
    everyone = (in_threads if engine == "local" else in_processes)(4, one_turned_around)
    shares, parts = equal(everyone)
    assert parts == PartLayout(NUMEL).num_parts
    assert shares == {0: 0.0, 1: 0.0, 2: 6 / parts, 3: 0.0}


@over_engines
@over_workers
def test_a_round_in_which_all_are_refused_fails_and_the_next_one_works(engine: str, workers: int) -> None:
    reason, mean = equal(answers(engine, workers, "all_refused"))
    assert re.match(r"round \d+: every contribution was refused", reason)
    assert mean == plain_mean(*range(workers)).tolist()


@over_engines
@several_workers
def test_a_failed_round_still_tells_who_stops_and_that_no_anchor_differs(engine: str, workers: int) -> None:
    assert equal(answers(engine, workers, "all_refused_says_who_stops")) == (True, False)


@over_fixed_engines
@several_workers
def test_a_failed_round_still_tells_that_all_are_done(engine: str, workers: int) -> None:
    assert equal(answers(engine, workers, "all_refused_says_that_all_are_done")) == (True, False)


@over_fixed_engines
@over_workers
def test_a_round_without_any_work_moves_headers_only(engine: str, workers: int) -> None:
    assert equal(answers(engine, workers, "no_work")) == (0.0, (), {}, HEADER_BYTES * (workers - 1))


@over_fixed_engines
@over_workers
def test_a_worker_with_patience_waits_for_late_ones_beyond_the_deadline(engine: str, workers: int) -> None:
    assert equal(answers(engine, workers, "patient")) == tuple(range(workers))


@pytest.mark.slow
@over_workers
def test_a_round_without_any_work_moves_no_parts_in_a_swarm(workers: int) -> None:
    assert equal(answers("swarm", workers, "no_work")) == (0.0, (), {}, 0)


@over_engines
@several_workers
def test_a_worker_with_another_anchor_is_refused_and_told_to_resynchronise(engine: str, workers: int) -> None:
    everyone = answers(engine, workers, "other_anchor")
    for contributors, refused, _ in everyone:
        assert contributors == tuple(range(workers - 1))
        assert refused == {workers - 1: "its anchor odd is not the others' same"}
    assert everyone[-1][2]


@over_engines
@over_workers
def test_fewer_parts_than_workers_are_averaged_too(engine: str, workers: int) -> None:
    expected = sum(values(worker, 3).double() for worker in range(workers)) / workers
    torch.testing.assert_close(
        torch.tensor(equal(answers(engine, workers, "tiny"))), expected.float(), rtol=1e-5, atol=1e-6
    )


@over_engines
@over_workers
def test_members_are_what_the_workers_said_of_themselves(engine: str, workers: int) -> None:
    expected = [(worker, "same", 10 + worker, 0.5) for worker in range(workers)]
    assert equal(answers(engine, workers, "members")) == expected


@over_engines
@over_workers
def test_every_worker_learns_the_cosine_of_every_pair_of_contributions(engine: str, workers: int) -> None:
    told = equal(answers(engine, workers, "alike"))
    assert [(a, b) for a, b, _ in told] == list(itertools.combinations(range(workers), 2))
    for a, b, cosine in told:
        expected = torch.cosine_similarity(values(a).double(), values(b).double(), dim=0)
        assert cosine == pytest.approx(float(expected), abs=1e-3)  # int8 has changed the values a little
    assert told == equal(answers("local", workers, "alike"))


@over_engines
@over_workers
def test_an_engine_tells_of_no_more_seconds_than_have_passed(engine: str, workers: int) -> None:
    everyone = answers(engine, workers, "phases")
    for told, passed in everyone:
        known = [seconds for seconds in vars(told).values() if seconds is not None]
        assert all(seconds >= 0 for seconds in known) and sum(known) <= passed
        if engine == "local":
            assert told.others_seconds is not None and told.send_seconds is None
        elif workers > 1 and engine != "bucket":
            assert len(known) == 3
    if engine == "bucket":  # each chunk of parts has one reducer, and 12 parts fit into one or several of them
        assert all(told.others_seconds is not None and told.send_seconds is not None for told, _ in everyone)
        assert any(told.reduce_seconds is not None for told, _ in everyone)
    if engine == "local":
        assert sum(told.reduce_seconds is not None for told, _ in everyone) == 1


@pytest.mark.slow
@over_workers
def test_both_engines_report_the_same_bytes(workers: int) -> None:
    local = answers("local", workers, "traffic")
    assert local == answers("torch_distributed", workers, "traffic")
    total = EncodedVector(codec("int8"), PartLayout(NUMEL)).num_bytes + HEADER_BYTES * workers / 2
    assert sum(sent for sent, _ in local) == sum(got for _, got in local) == 2 * (workers - 1) * total


@pytest.mark.slow
@over_workers
def test_contributions_and_means_of_different_sizes_are_counted_as_they_are(workers: int) -> None:
    local = answers("local", workers, "sparse_traffic")
    assert local == answers("torch_distributed", workers, "sparse_traffic")
    vector = EncodedVector(codec("topk"), PartLayout(NUMEL))
    total = (workers - 1) * (vector.num_bytes + vector.mean.num_bytes)
    headers = workers * (workers - 1) * HEADER_BYTES
    assert sum(sent for sent, _ in local) == sum(got for _, got in local) == total + headers
    swarm_sent = sum(sent for sent, _ in answers("swarm", workers, "sparse_traffic"))
    assert total <= swarm_sent <= MOST_ATTEMPTS * (1.05 * total + 200 * workers**2)


@pytest.mark.slow
@over_workers
def test_a_swarm_moves_every_part_once_to_its_reducer_and_once_back(workers: int) -> None:
    """Each reducer's own parts stay where they are; around the rest is a little framing. A busy machine may need more
    than one attempt, whose parts may be sent in vain."""
    told = answers("swarm", workers, "traffic")
    total = 2 * (workers - 1) * EncodedVector(codec("int8"), PartLayout(NUMEL)).num_bytes
    sent, got = sum(sent for sent, _ in told), sum(got for _, got in told)
    assert total <= got <= sent <= MOST_ATTEMPTS * 1.05 * total
    assert sent == got or sent > 1.05 * total, "nothing is lost within one attempt"


@pytest.mark.slow
@over_workers
def test_in_a_bucket_every_part_is_written_once_by_each_contributor_and_once_as_the_mean(workers: int) -> None:
    """Beside them are the posts and the plan. On a busy machine a range of the mean may be written in vain."""
    vector = EncodedVector(codec("int8"), PartLayout(NUMEL))
    sent = sum(sent for sent, _ in answers("bucket", workers, "traffic"))
    written = workers * vector.num_bytes + vector.mean.num_bytes
    beside = workers * (workers + 1) * 2048
    assert written <= sent <= written + (workers - 1) * vector.mean.num_bytes + beside


@over_fixed_engines
@several_workers
def test_workers_that_train_something_else_are_told_so_on_every_worker(engine: str, workers: int) -> None:
    for text in answers(engine, workers, "other_layout"):
        assert "trains something else" in text and "config.toml" in text


@over_fixed_engines
@several_workers
def test_workers_in_different_rounds_are_told_so_on_every_worker(engine: str, workers: int) -> None:
    for text in answers(engine, workers, "other_round"):
        assert "in round 0 (fragment 1)" in text and "Call finish() on every worker" in text


# start_round returns at once


def test_start_round_returns_before_the_others_have_posted_locally() -> None:
    posted = threading.Event()

    def first_posts_then_lets_the_other(engine: Engine) -> list[float]:
        if engine.worker == 1:
            assert posted.wait(20.0)
        pending = engine.start_round(RoundKey(0, 0), contribution(engine), 20.0)
        posted.set()
        return decoded(pending.wait())

    assert equal(in_threads(2, first_posts_then_lets_the_other)) == plain_mean(0, 1).tolist()


def waits_for_the_first(engine: TorchDistributedEngine) -> list[float]:
    """Worker 1 posts only after worker 0 has said, over the store, that its start_round has returned."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if engine.worker == 1:
        store.wait(["returned"])
    pending = engine.start_round(RoundKey(0, 0), contribution(engine), 20.0)
    if engine.worker == 0:
        store.set("returned", b"yes")
    mean = decoded(pending.wait())
    engine.close()
    assert "is closed" in message(lambda: engine.start_round(RoundKey(1, 0), contribution(engine), 1.0), EngineError)
    return mean


@pytest.mark.slow
def test_start_round_returns_before_the_others_have_posted_and_raises_after_close() -> None:
    assert equal(in_processes(2, waits_for_the_first)) == plain_mean(0, 1).tolist()


def means_over_waves(engine: TorchDistributedEngine) -> dict[int, tuple[bytes, int]]:
    """The same average with ever smaller waves: all at once, some, and one part for each worker at a time."""
    means = {}
    for sequence, (wanted, size) in enumerate(((1, 1 << 21), (32, 10_000), (1 << 20, 1))):
        reduction._WAVES_WANTED, reduction._MIN_WAVE_BYTES_PER_WORKER = wanted, size
        result = average(engine, sequence, numel=61 * 1024 + 5, name="int8")
        means[size] = result.mean.data.numpy().tobytes(), result.bytes_sent
    return means


@pytest.mark.slow
@several_workers
def test_how_many_waves_a_vector_takes_never_changes_a_bit(workers: int) -> None:
    local = in_threads(workers, lambda engine: average(engine, numel=61 * 1024 + 5, name="int8").mean.data.numpy())
    everyone = in_processes(workers, means_over_waves)
    for means in everyone:
        assert {data for data, _ in means.values()} == {local[0].tobytes()}
    if workers == 2:  # with two, a part crosses once each way, whichever of them reduces it
        assert len({sent for means in everyone for _, sent in means.values()}) == 1
