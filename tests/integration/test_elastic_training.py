"""Whole training runs of workers that come and go, in threads over an elastic engine without a network."""

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.data.corpus import Corpus
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import EngineError, Excluded, LossNotFinite
from diloco.history.rounds import REPORTED_PHASES
from diloco.training.config.run import RunConfig, TrainingConfig
from diloco.training.loop import Training
from diloco.training.records.summary import data_parallel_bytes, summarize
from diloco.training.swarm.peers import CUT_OFF_SECONDS
from support.elastic_training import STEPS, Swarm, joins_at, make_run
from support.event_log import history_of, read_events
from support.saved_runs import quick_runs
from support.thread_ranks import on_ranks


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_runs():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Corpus]:
    return make_run(tmp_path_factory.mktemp("corpus"))


def test_a_joiner_begins_where_the_others_are_and_reads_its_share(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 9)))
    swarm.end()
    joined = swarm.events(1, "joined")[0]
    assert joined["step"] == 10 and joined["rounds"] == 2
    first, second = (swarm.events(number, "worker_finished")[0] for number in (0, 1))
    assert first["anchor_digest"] == second["anchor_digest"]
    assert first["inner_steps"] == second["inner_steps"] == STEPS
    assert swarm.events(1, "shards")[-1]["shards"] == [1, 3, 5] and swarm.events(0, "shards")[-1]["shards"] == [0, 2, 4]
    rates = [{event["step"]: event["learning_rate"] for event in swarm.events(n, "step")} for n in (0, 1)]
    assert rates[1].keys() == set(range(11, STEPS + 1))
    assert all(rates[0][step] == rate for step, rate in rates[1].items())  # no warm-up of its own
    assert swarm.events(1, "step")[-1]["tokens"] == (STEPS - 10) * made[0].tokens_per_step


def test_text_is_read_once_while_members_stay_the_same(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 9)))
    swarm.end()
    first, second = swarm.read[0], swarm.read[1]
    assert len(set(first)) == len(first) and len(set(second)) == len(second)
    until_shared = 2 * 2  # the two steps between the joining and the round that told of it, two rows each
    assert len(set(first) & set(second)) <= until_shared


def test_whoever_stops_leaves_alone_and_its_shards_go_on_elsewhere(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 5, step13=Training.request_stop)))
    swarm.end()
    left, stayed = swarm.events(1, "worker_finished")[0], swarm.events(0, "worker_finished")[0]
    assert left["stopped_early"] and not stayed["stopped_early"]
    assert stayed["inner_steps"] == STEPS
    assert swarm.events(0, "shards")[-1]["shards"] == [0, 1, 2, 3, 4, 5]
    assert len(set(swarm.read[0])) == len(swarm.read[0])
    assert swarm.events(1, "checkpoint")[-1]["step"] == 14


def test_a_called_worker_jumps_and_its_learning_rate_with_it(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, step5=lambda _: swarm.meeting.call(2)))
    swarm.end()
    steps = [event["step"] for event in swarm.events(0, "step")]
    assert 7 in steps and 12 not in steps[:7]
    called = [event["sequence"] for event in swarm.events(0, "called")]
    assert 2 in called
    config = made[0]
    rates = {event["step"]: event["learning_rate"] for event in swarm.events(0, "step")}
    calm = Swarm(made, tmp_path / "calm")
    (tmp_path / "calm").mkdir()
    calm.start(calm.worker(0))
    calm.end()
    expected = {event["step"]: event["learning_rate"] for event in calm.events(0, "step")}
    assert all(expected[step] == rate for step, rate in rates.items())
    assert swarm.events(0, "step")[-1]["tokens"] == len(steps) * config.tokens_per_step


def test_a_checkpoint_that_was_jumped_over_is_made_up_for(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    config = replace(made[0], checkpoint=replace(made[0].checkpoint, interval=7, keep=10))
    swarm = Swarm((config, made[1]), tmp_path)
    swarm.start(swarm.worker(0, step4=lambda _: swarm.meeting.call(1)))  # from step 5 to the round of step 8
    swarm.end()
    assert [event["step"] for event in swarm.events(0, "checkpoint")] == [8, 14, 21, STEPS]


def test_a_swarm_that_is_gone_goes_on_from_the_newest_checkpoint(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, step13=Training.request_stop, **joins_at(swarm, 5, step12=Training.request_stop)))
    swarm.end()
    again = Swarm(made, tmp_path)
    resumed = again.worker(0, resume=True)
    assert resumed.mode.averager.inner_steps >= 13
    assert resumed.reader.shards == [0, 1, 2, 3, 4, 5]
    again.start(resumed)
    again.end()
    assert again.events(0, "worker_finished")[-1]["inner_steps"] == STEPS
    read = swarm.read[0] + again.read[0]
    assert len(set(read)) == len(read)  # what others had read is known, and not read again
    assert not set(again.read[0]) & set(swarm.read[1][: 2 * 5])


def _check_that_phases_are_told(swarm: Swarm) -> None:
    """What a worker logs of a round is what the other one reads in its report of the next."""
    own = {one["sequence"]: one for one in swarm.events(1, "round")}
    told = [
        one["report"]["last_round_seconds"]
        for event in swarm.events(0, "round")
        for one in event["members"]
        if one["worker"] == 1
    ]
    known = [one for one in told if one]
    assert known
    for sequence, *seconds in known:
        expected = [own[int(sequence)][f"{name}_seconds"] for name in REPORTED_PHASES]
        assert seconds == [None if one is None else pytest.approx(one, abs=1e-4) for one in expected]


def test_the_summary_counts_work_not_positions(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 9)))
    swarm.end()
    for number in (0, 1):
        summary = summarize(swarm.config, history_of(read_events(tmp_path / f"machine-{number}")))
        assert summary["status"] == "complete"
        assert (summary["workers"], summary["members_seen"]) == (2, 2)
        assert summary["tokens"] == (STEPS + STEPS - 10) * swarm.config.tokens_per_step
        assert len(set(summary["anchor_digests"])) == 1 and len(summary["anchor_digests"]) == 2
        assert summary["local_steps"] == (STEPS - 10 if number else STEPS)
        baseline = data_parallel_bytes(summary["parameters"], summary["local_steps"], 2)
        assert summary["data_parallel_bytes_per_worker"] == baseline
        assert summary["training_seconds"] <= summary["seconds"] + 0.01
    _check_that_phases_are_told(swarm)


class Killed(BaseException):
    """In place of kill -9: no last word."""


def test_after_a_member_was_killed_and_came_back_all_machines_count_the_same_tokens(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    """H = 4. Worker 1 joins at step 6, dies at 14, two steps after its last round, and comes back at 18."""
    swarm, config = Swarm(made, tmp_path), made[0]
    told: list[int] = []

    def die(training: Training) -> None:
        raise Killed

    def first(training: Training) -> None:
        swarm.start(swarm.worker(1, step13=die))

    def again(training: Training) -> None:
        for thread in swarm.threads[1:]:
            thread.join(60)
        swarm.errors.clear()
        training = swarm.worker(1)
        training.engine.progress = lambda **values: told.append(values["tokens"])  # type: ignore[method-assign]
        swarm.start(training)

    swarm.start(swarm.worker(0, step5=first, step17=again))
    swarm.end()
    in_means = {0: STEPS, 1: (12 - 6) + (STEPS - 18)}
    summaries = [summarize(config, history_of(read_events(tmp_path / f"machine-{number}"))) for number in (0, 1)]
    assert [one["tokens"] for one in summaries] == [sum(in_means.values()) * config.tokens_per_step] * 2
    assert [one["members_seen"] for one in summaries] == [2, 2]
    assert [one["local_tokens"] for one in summaries] == [steps * config.tokens_per_step for steps in in_means.values()]
    assert told[-1] == in_means[1] * config.tokens_per_step, "what `diloco status` shows of it"


def test_steps_are_logged_though_a_worker_jumps_over_every_multiple_of_the_interval(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    config = replace(made[0], training=replace(made[0].training, log_interval=12))
    swarm = Swarm((config, made[1]), tmp_path)
    swarm.start(swarm.worker(0, step5=lambda _: swarm.meeting.call(2)))  # from step 6 to the round of step 12
    swarm.end()
    assert [event["step"] for event in swarm.events(0, "step")] == [13, 24]


def test_rounds_that_fail_while_cut_off_end_nothing_but_broken_numbers_do(
    made: tuple[RunConfig, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = Swarm(made, tmp_path)
    training = swarm.worker(0)
    peers = training.peers
    peers.check_progress(["no network"] * 50, 2.0)
    peers.check_progress(["no network"] * 50, None)
    for loss in (math.inf, -math.inf, math.nan):
        with pytest.raises(EngineError, match=f"the loss is {loss}: lower"):
            peers.check_progress(["no contribution"] * 3, loss)
    monkeypatch.setattr("diloco.training.swarm.peers.CUT_OFF_SECONDS", -1.0)
    with pytest.raises(EngineError, match=r"diloco doctor.*--resume"):
        peers.check_progress(["no network"] * 3, 2.0)


def test_all_ranks_of_a_worker_that_is_cut_off_for_too_long_give_up_at_the_same_step(
    made: tuple[RunConfig, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of one rank it is an hour, by that of the other not yet."""
    swarm = Swarm(made, tmp_path)
    peers = [swarm.worker(worker).peers for worker in (0, 1)]
    clock = threading.local()
    time = SimpleNamespace(monotonic=lambda: getattr(clock, "now", 1.0))
    monkeypatch.setattr("diloco.training.swarm.peers.time", time)

    def gives_up(ranks: WorkerRanks) -> bool:
        mine = peers[ranks.rank]
        mine._engine.ranks = ranks  # type: ignore[attr-defined]
        mine.check_progress(["no network"], None)
        clock.now = CUT_OFF_SECONDS + (1.5 if ranks.rank else 0.5)
        try:
            mine.check_progress(["no network"] * 3, None)
        except EngineError:
            return True
        return False

    assert on_ranks(2, gives_up) == [True, True]


def test_a_worker_that_the_swarm_has_excluded_ends_with_the_reason(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    training = Swarm(made, tmp_path).worker(0)
    training.engine.excluded = "revoked by the owner"  # type: ignore[attr-defined]
    with pytest.raises(Excluded, match="the swarm has excluded this worker: revoked by the owner"):
        training.run()
    assert len(read_events(tmp_path / "machine-0")) > 1


def test_a_worker_whose_loss_is_nan_ends_at_once_and_names_the_step(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    broken = replace(made[0], inner=replace(made[0].inner, lr=1e20, warmup_steps=0, clip_norm=None))
    with pytest.raises(LossNotFinite, match=r"worker 0 is nan at step 3 .* lower --inner\.lr \(now 1e\+20\)"):
        Swarm((broken, made[1]), tmp_path).worker(0).run()


def test_a_missed_round_is_made_up_for_and_told(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.meeting.drop = frozenset({(1, 3)})
    swarm.start(swarm.worker(0, **joins_at(swarm, 9)))
    swarm.end()
    assert [event["sequence"] for event in swarm.events(1, "resync")] == [4]
    assert swarm.events(1, "worker_finished")[0]["resyncs"] == 1
    digests = {swarm.events(number, "worker_finished")[0]["anchor_digest"] for number in (0, 1)}
    assert len(digests) == 1


def test_training_begins_when_so_many_are_there_as_were_asked_for(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    config = replace(made[0], swarm=replace(made[0].swarm, min_workers=2), training=TrainingConfig(2, eval_windows=4))
    swarm = Swarm((config, made[1]), tmp_path)
    training = swarm.worker(0)
    training.request_stop()  # no other worker comes
    swarm.start(training)
    swarm.end()
    assert [(e["present"], e["wanted"]) for e in swarm.events(0, "waiting")] in ([], [(1, 2)])
    assert swarm.events(0, "worker_finished")[0]["inner_steps"] == 0


def test_a_worker_that_comes_during_the_warm_start_begins_after_it(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    sync, warm = replace(made[0].sync, warm_start=6), 6
    config = replace(made[0], sync=sync, swarm=replace(made[0].swarm, min_workers=2))
    swarm = Swarm((config, made[1]), tmp_path)
    swarm.start(swarm.worker(0))  # it waits for the second one after the warm start, not before it
    swarm.start(swarm.worker(1))  # built when the warm start is over
    swarm.end()
    assert warm <= swarm.events(1, "joined")[0]["step"] < warm + sync.num_inner_steps
    ends = [swarm.events(number, "worker_finished")[0] for number in (0, 1)]
    assert {(end["inner_steps"], end["anchor_digest"]) for end in ends} == {(STEPS, ends[0]["anchor_digest"])}
    assert swarm.events(0, "round")[0]["step"] == warm + sync.num_inner_steps


def test_no_failed_fetch_of_a_state_ends_a_worker(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.meeting.drop = frozenset({(1, 3)})

    def nobody(_: Training) -> None:
        swarm.meeting.unavailable = 1

    swarm.start(swarm.worker(0, step15=nobody, **joins_at(swarm, 9)))
    swarm.end()
    assert swarm.events(1, "worker_finished")[0]["inner_steps"] == STEPS
