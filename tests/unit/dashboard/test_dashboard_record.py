"""What the dashboard makes of a log: figures, rounds, members, replay, curves of few points."""

import json
import math
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from diloco.dashboard.runs import Run, RunFolder
from diloco.dashboard.series import mean_by_step, thin_out
from diloco.errors import ConfigError
from diloco.history.figures import RunFigures
from diloco.training.config.run import RunConfig
from diloco.training.records.summary import summarize
from support.dashboard_runs import (
    PARAMETERS,
    START,
    TOKENS_PER_STEP,
    Event,
    append,
    calm_events,
    event,
    failed_round,
    round_events,
    started,
    step,
    write_run,
)
from support.event_log import history_of


def test_figures_are_those_of_the_summary(tmp_path: Path) -> None:
    events = calm_events(workers=3, steps=100)
    state = Run(write_run(tmp_path, events), "run").state()
    summary = summarize(RunConfig(workers=3), history_of(events))
    assert state["rounds"]["merged"] == summary["rounds"] == 5
    assert state["tokens"] == summary["tokens"]
    assert state["validation"]["perplexity"] == summary["validation_perplexity"]
    assert state["utilization"] == pytest.approx(summary["compute_utilization"])
    communication = state["communication"]
    assert communication["data_parallel_bytes_per_worker"] == summary["data_parallel_bytes_per_worker"]
    assert communication["bytes_sent_per_worker"] == summary["bytes_sent_per_worker"]
    (tmp_path / "summary.json").write_text(json.dumps({"status": "complete", "compute_utilization": 0.625}))
    assert Run(tmp_path, "run").state()["utilization"] == 0.625, "the report's own, once there is one"


def test_time_left_follows_from_the_steps_so_far(tmp_path: Path) -> None:
    state = Run(write_run(tmp_path, calm_events(steps=100), steps=400), "run").state()
    assert state["seconds_left"] == pytest.approx(300.0)  # a second a step


def test_a_round_names_the_straggler_and_what_the_others_waited(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path, calm_events(workers=3, steps=100)), "run")
    last = run.rounds(None, 1)["rounds"][0]
    assert (last["sequence"], last["straggler"]) == (4, 2)
    wait = {part["worker"]: part["phases"]["wait"] for part in last["workers"]}
    assert wait[0] == pytest.approx(2.9) and wait[2] == pytest.approx(0.5)
    assert run.state()["rounds"]["straggler"] == {"worker": 2, "rounds": 5, "of": 5}


def test_failed_and_refused_rounds_are_listed_with_their_reasons(tmp_path: Path) -> None:
    run = write_run(tmp_path, calm_events(steps=40))
    append(run, *failed_round(2, 2, 20, "worker 1 did not answer"))
    append(run, *round_events(3, 2, 20, refused={"1": "its norm is 900"}, contributors=[0]))
    rounds = Run(run, "run").state()["rounds"]
    assert (rounds["merged"], rounds["failed"], rounds["refused"]) == (3, 1, 1)
    assert rounds["failures"][0]["reason"] == "worker 1 did not answer"
    assert rounds["failures"][0]["workers"] == [0, 1]
    assert rounds["refusals"][0]["refused"] == {"1": "its norm is 900"}


def test_clipped_contributions_are_listed_with_the_reason(tmp_path: Path) -> None:
    events = [started(0, 1), *round_events(0, 1, 20), *round_events(1, 1, 20, clipped={"0": "its norm is 9"})]
    rounds = Run(write_run(tmp_path, events), "run").state()["rounds"]
    assert (rounds["clipped"], rounds["refused"]) == (1, 0)
    assert [(entry["sequence"], entry["clipped"]) for entry in rounds["refusals"]] == [(1, {"0": "its norm is 9"})]


def test_unequal_anchors_are_found(tmp_path: Path) -> None:
    members = [{"worker": w, "anchor_digest": "b" if w == 1 else "a", "report": {}} for w in range(3)]
    events = [started(0, 3), *round_events(0, 1, 20), *round_events(1, 1, 20, members=members)]
    rounds = Run(write_run(tmp_path, events), "run").state()["rounds"]
    assert rounds["digests_compared"] == 2
    assert rounds["digests_unequal"] == [{"sequence": 1, "workers": [1], "merged": True}]


def test_a_moment_of_the_run_is_shown_as_it_was(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path, calm_events(steps=100)), "run")
    then = run.state(until=START + 45.5)
    assert (then["step"], then["rounds"]["merged"], then["status"]) == (40, 2, "training")
    assert then["validation"]["step"] == 40
    assert max(run.series(START + 45.5, 500, None)["loss"]["step"]) == 40
    assert run.state()["step"] == 100


def test_members_come_go_and_are_banned_with_the_reason(tmp_path: Path) -> None:
    run = write_run(tmp_path, [started(0, 1)], engine="swarm")
    listed = {"member": 1, "where": "ada", "step": 7, "loss": 3.0, "contributed": 2}
    append(
        run,
        event("member_joined", 1.0, member=1, peer="p1", label="ada"),
        event("member_joined", 2.0, member=2, peer="p2", label=""),
        event("members", 10.0, present=[listed | {"state": "training"}]),
        event("member_lost", 20.0, member=2, peer="p2", label="", reason="silent for 5 s"),
        event("member_banned", 30.0, member=1, peer="p1", label="ada", reason="5 refusals"),
        event("members", 40.0, present=[listed | {"state": "lost"}]),
    )
    shown = {entry["member"]: entry for entry in Run(run, "run").state()["members"]}
    assert (shown[1]["state"], shown[1]["reason"], shown[1]["step"]) == ("banned", "5 refusals", 7)
    assert (shown[2]["state"], shown[2]["reason"]) == ("lost", "silent for 5 s")
    early = {entry["member"]: entry["state"] for entry in Run(run, "run").state(until=START + 15)["members"]}
    assert early == {1: "training", 2: "joined"}


def test_what_a_resume_took_back_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path, calm_events(workers=1, steps=100))
    append(run, started(0, 1, 200.0), event("resumed", 201.0, step=60, rounds=3, workers=1, new=False, notes=[]))
    state = Run(run, "run").state()
    assert (state["step"], state["rounds"]["merged"], state["validation"]["step"]) == (60, 3, 60)


def test_a_pause_is_no_time_on_the_axis_of_seconds(tmp_path: Path) -> None:
    events = calm_events(workers=2, steps=40)
    again = [entry | {"time": entry["time"] + 5000} for entry in [*(started(w, 2, 40.0) for w in (0, 1)), step(0, 50)]]
    run = Run(write_run(tmp_path, [*events, *again]), "run")
    last = max(entry["time"] for entry in events) - START
    curves = run.series(None, 100, None)
    assert curves["loss"]["seconds"] == pytest.approx([10.01, 20.01, 30.01, 40.01, last + 10])
    assert curves["workers"]["0"]["seconds"][-1] == pytest.approx(last + 10)
    assert curves["workers"]["0"]["tokens"][-1] == (50 + 40) * TOKENS_PER_STEP, "of all workers, as on every curve"


def test_a_loss_that_is_no_number_is_a_gap(tmp_path: Path) -> None:
    events = [started(0, 1), step(0, 10), step(0, 20) | {"loss": None}, step(0, 30) | {"gradient_norm": None}]
    series = Run(write_run(tmp_path, events), "run").series(None, 100, None)
    assert [value is None for value in series["loss"]["mean"]] == [False, True, False]
    assert [value is None for value in series["workers"]["0"]["loss"]] == [False, True, False]
    json.dumps(series, allow_nan=False)


def test_few_points_keep_every_extreme_and_every_gap() -> None:
    values = np.sin(np.arange(50_000) / 500)
    values[12_345], values[31_000], values[40_000] = 99.0, -99.0, np.nan
    kept_rows = thin_out(values, 300)
    assert len(kept_rows) <= 300
    assert {0, 12_345, 31_000, 40_000, 49_999} <= set(kept_rows.tolist())


def test_the_mean_over_workers_keeps_the_extremes_of_each_range() -> None:
    steps = np.repeat(np.arange(10_000.0), 2)
    values = np.tile([1.0, 3.0], 10_000)
    values[777] = 50.0
    curve = mean_by_step(steps, values, 100)
    assert len(curve["step"]) <= 100
    assert curve["high"].max() == 50.0 and curve["low"].min() == 1.0
    assert np.median(curve["mean"]) == 2.0


def test_a_long_run_is_drawn_with_few_points(tmp_path: Path) -> None:
    """How long a hundred thousand events take: benchmarks/dashboard.py."""
    events = [step(worker, number) for number in range(1, 5001) for worker in range(2)]
    run = Run(write_run(tmp_path, [started(0, 2), started(1, 2), *events]), "run")
    series = run.series(None, 800, None)
    assert run.state()["step"] == 5000
    assert len(series["loss"]["step"]) <= 800 and len(series["workers"]["1"]["step"]) <= 800
    assert max(series["loss"]["step"]) == max(series["workers"]["1"]["step"]) == 5000


def test_thousands_of_members_are_counted_and_the_rest_left_out(tmp_path: Path) -> None:
    joined = [event("member_joined", 1.0, member=n, peer=f"p{n}", label="") for n in range(5000)]
    listed = {"where": "", "step": 1, "loss": 2.0, "contributed": 0, "state": "training"}
    again = event("members", 2.0, present=[listed | {"member": number} for number in range(5000)])
    state = Run(write_run(tmp_path, [started(0, 1), *joined, again, again]), "run").state()
    assert len(state["members"]) + state["members_left_out"] == 5000
    assert len(state["notes"]) <= 200


def test_a_folder_of_runs_lists_them_and_new_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "a", calm_events())
    write_run(tmp_path / "study" / "b", calm_events())
    runs = RunFolder(tmp_path)
    assert set(runs.find()) == {"a", "study/b"}
    write_run(tmp_path / "c", [])
    assert set(runs.find()) == {"a", "study/b", "c"}
    assert runs.run("../a") is None


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_a_folder_without_runs_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is not a run folder, nor a folder of runs"):
        RunFolder(tmp_path / name)


def test_remote_workers_of_a_swarm_are_known_by_their_reports(tmp_path: Path) -> None:
    events = [started(0, 1), step(0, 20), *round_events(0, 3, 20)]
    events = [entry for entry in events if entry["worker"] == 0]  # the others write their own logs
    state = Run(write_run(tmp_path, events, engine="swarm"), "run").state()
    assert [entry["worker"] for entry in state["workers"]] == [0, 1, 2]
    assert [entry["local"] for entry in state["workers"]] == [True, False, False]
    assert state["workers"][2]["tokens"] == 20 * TOKENS_PER_STEP
    assert state["parameters"] == PARAMETERS
    assert math.isclose(state["workers"][1]["loss"], 5.0)


def test_the_phases_of_a_round_are_those_of_the_events(tmp_path: Path) -> None:
    phases = {"encode_seconds": 0.1, "flight_seconds": None, "others_seconds": 2.0, "send_seconds": 0.3,
              "reduce_seconds": 0.05, "merge_seconds": 0.02, "waited_seconds": 2.4}  # fmt: skip
    run = Run(write_run(tmp_path, [started(0, 1), *round_events(0, 1, 20, **phases)]), "run")
    part = run.rounds(None, 1)["rounds"][0]["workers"][0]
    assert part["phases"] == {"encode": 0.1, "others": 2.0, "send": 0.3, "reduce": 0.05, "merge": 0.02, "wait": 2.4}


def test_rounds_before_a_worker_joined_are_counted_as_in_the_terminal(tmp_path: Path) -> None:
    events = [started(0, 1), step(0, 200) | {"rounds": 40}, *round_events(41, 1, 20)]
    counts = RunFigures(history_of(events))
    rounds = Run(write_run(tmp_path, events), "run").state()["rounds"]
    assert (rounds["merged"], rounds["failed"]) == (counts.merged_rounds, counts.failed_rounds) == (40, 0)


def test_large_rounds_that_every_worker_reports_are_read_once_and_again_after_a_resume(tmp_path: Path) -> None:
    workers = 40  # 780 cosines: lines of more than 8 kB
    events = [started(0, workers), *round_events(0, workers, 20), *round_events(1, workers, 20)]
    run = Run(write_run(tmp_path, events), "run")
    rounds = run.state()["rounds"]
    assert (rounds["merged"], rounds["digests_compared"], len(rounds["cosines"])) == (2, 2, 780)
    assert len(rounds["last"]["workers"]) == workers
    resumed = event("resumed", 300.0, step=20, rounds=1, workers=workers, new=False, notes=[])
    odd = [{"worker": w, "anchor_digest": str(w), "report": {}, "note": "x" * 300} for w in range(workers)]
    append(tmp_path, resumed, *round_events(1, workers, 20, members=odd))
    assert run.state()["rounds"]["digests_unequal"][0]["sequence"] == 1


def test_a_joiner_is_shown_with_its_progress(tmp_path: Path) -> None:
    run = write_run(tmp_path, [event("swarm", 0.0, founded=False)], engine="swarm")
    append(run, event("state_arriving", 1.0, received_bytes=3 << 20, all_bytes=12 << 20))
    entry = Run(run, "run")
    assert entry.state()["workers"][0]["state"] == "joining: 25%"
    append(run, event("joined", 3.0, step=120, rounds=12))
    assert entry.state()["workers"][0]["state"] == "joined"


def test_the_last_event_of_a_worker_completes_its_counts_and_repeats_no_point(tmp_path: Path) -> None:
    ended = {
        "stopped_early": False,
        "rounds": 5,
        "rounds_failed": 0,
        "bytes_sent": 7777,
        "tokens": 100 * TOKENS_PER_STEP,
        "sync_seconds": 12.0,
        "elapsed_seconds": 101.0,
        "anchor_digest": "a",
    }
    run = write_run(tmp_path, calm_events(workers=1, steps=100))
    append(run, event("worker_finished", 120.0, inner_steps=100, **ended))
    entry = Run(run, "run")
    assert entry.state()["communication"]["bytes_sent_per_worker"] == 7777
    assert entry.state()["status"] == "complete"
    assert entry.series(None, 100, None)["workers"]["0"]["step"] == list(range(10, 101, 10))
    other = write_run(tmp_path / "other", calm_events(workers=1, steps=100))
    append(other, event("worker_finished", 120.0, inner_steps=104, **ended))
    assert Run(other, "run").state()["step"] == 104


def test_cosines_are_kept_of_the_latest_rounds_and_their_range_of_all(tmp_path: Path) -> None:
    far = [[0, 1, -0.2], [0, 2, 0.9], [1, 2, 0.4]]
    rounds = [entry for n in range(40) for entry in round_events(n, 3, 20, cosines=far)]
    run = Run(write_run(tmp_path, [started(0, 3), *rounds]), "run")
    assert run.state()["rounds"]["cosines"] == far
    assert run.state(until=START + 200)["rounds"]["cosines"] == []
    series = run.series(None, 100, None)["rounds"]
    assert set(series["cosine_low"]) == {-0.2} and set(series["cosine_high"]) == {0.9} and len(series["step"]) == 40


def test_a_data_parallel_run_without_rounds_is_compared_as_in_the_summary(tmp_path: Path) -> None:
    events = [started(worker, 3) for worker in range(3)]
    events += [step(worker, number) for number in (10, 20) for worker in range(3)]
    state = Run(write_run(tmp_path, events), "run").state()
    summary = summarize(RunConfig(workers=3, mode="data-parallel"), history_of(events))
    assert state["communication"]["data_parallel_bytes_per_worker"] == summary["data_parallel_bytes_per_worker"] > 0
    assert state["rounds"]["merged"] == summary["rounds"] == 1


def test_workers_that_a_resume_has_left_out_no_longer_hold_the_step_back(tmp_path: Path) -> None:
    run = write_run(tmp_path, calm_events(workers=3, steps=40))
    append(run, event("resumed", 200.0, step=40, rounds=2, workers=2, new=False, notes=[]))
    append(run, *(step(worker, 60) | {"time": START + 260} for worker in range(2)))
    state = Run(run, "run").state()
    assert (state["step"], len(state["workers"])) == (60, 2)


def test_the_phases_of_a_worker_elsewhere_come_with_its_next_round(tmp_path: Path) -> None:
    events = [entry for number in (0, 1, 2) for entry in round_events(number, 2, 20) if entry["worker"] == 0]
    for entry in events:
        for member in entry.get("members", ())[1:]:  # it computes for 30 s where this machine needs 18
            member["report"] |= {"elapsed_seconds": 40.0 * (entry["sequence"] + 1), "sync_seconds": 0.0}
            member["report"]["last_round_seconds"] = [entry["sequence"] - 1, 0.1, None, 2.5, 0.25, 2.0, 0.4, 0.1]
    run = Run(write_run(tmp_path, [started(0, 1), *events], engine="swarm"), "run")
    first, second, third = [entry["workers"][1] for entry in run.rounds(None, 3)["rounds"]]
    ended = START + 2 * 20 + 3.0
    assert second["elsewhere"] and second["ended"] == ended and second["posted"] == ended - 2.75
    assert second["started"] == pytest.approx(ended - 2.75 - 0.1 - 40.0)
    assert second["phases"] == {"encode": 0.1, "merge": 0.25, "others": 2.0, "send": 0.4, "reduce": 0.1, "wait": 2.5}
    assert first["phases"] and third["phases"] == {} and third["compute_seconds"] == 40.0
    assert run.rounds(None, 1)["rounds"][0]["straggler"] == 1


@pytest.mark.parametrize("numbers", [[1e308] * 8, [0, "x"], [0, *[-5.0] * 7], ["a"], [None] * 8, [0, *[math.inf] * 7]])
def test_phases_that_cannot_be_are_left_out(tmp_path: Path, numbers: list[object]) -> None:
    events = [entry for number in (0, 1) for entry in round_events(number, 2, 20) if entry["worker"] == 0]
    for entry in events:
        for member in entry.get("members", ())[1:]:
            member["report"]["last_round_seconds"] = numbers
    run = Run(write_run(tmp_path, [started(0, 1), *events], engine="swarm"), "run")
    assert [entry["workers"][1]["phases"] for entry in run.rounds(None, 2)["rounds"]] == [{}, {}]
    assert run.state()["rounds"]["merged"] == 2


def test_a_worker_elsewhere_that_is_lost_has_no_speed_and_one_here_that_has_ended_is_done(tmp_path: Path) -> None:
    events = [entry for entry in [started(0, 1), step(0, 20), *round_events(0, 2, 20)] if entry["worker"] == 0]
    here = {"member": 0, "where": "here", "step": 20, "loss": 3.0, "contributed": 0, "state": "training"}
    events += [
        event("members", 30.0, present=[here, here | {"member": 1}]),
        event("member_lost", 31.0, member=1, peer="p1", label="", reason="silent for 5 s"),
    ]
    run = write_run(tmp_path, events, engine="swarm")
    state = Run(run, "run").state()
    assert [entry["active"] for entry in state["workers"]] == [True, False]
    assert state["tokens_per_second"] == state["workers"][0]["tokens_per_second"]
    append(run, event("worker_finished", 40.0, inner_steps=20, tokens=20 * TOKENS_PER_STEP))
    assert [entry["state"] for entry in Run(run, "run").state()["members"]] == ["done", "lost"]


def _again(events: list[Event], seconds: float) -> list[Event]:
    return [entry | {"time": entry["time"] + seconds} for entry in events]


def test_tokens_per_second_of_a_resumed_run_have_neither_walls_nor_holes(tmp_path: Path) -> None:
    """A second a step, before and after a pause of an hour."""
    resumed = event("resumed", 50.5, step=40, rounds=2, workers=1, new=False, notes=[])
    late = [started(0, 1, 50.0), resumed, *(step(0, number) for number in range(50, 101, 10))]
    events = [*calm_events(workers=1, steps=40), *_again(late, 3600)]
    rates = Run(write_run(tmp_path, events), "run").series(None, 100, None)["rates"]
    seconds, measured = rates["seconds"], [value for value in rates["tokens_per_second"] if value is not None]
    assert measured == pytest.approx([TOKENS_PER_STEP] * len(measured)) and len(measured) > 5
    assert min(b - a for a, b in pairwise(seconds)) > 0.5 and seconds[-1] < 120


def test_the_speed_of_all_workers_is_never_that_of_a_part_of_them_after_a_resume(tmp_path: Path) -> None:
    """Worker 1 takes its first steps after the pause half a minute later than worker 0."""
    resumed = [event("resumed", 50.5, n, step=40, rounds=2, workers=2, new=False, notes=[]) for n in range(2)]
    late = [step(n, number) | {"time": START + number + 30.0 * n} for number in range(42, 121, 2) for n in range(2)]
    again = [started(0, 2, 50.0), started(1, 2, 50.0), *resumed, *sorted(late, key=lambda entry: entry["time"])]
    run = Run(write_run(tmp_path, [*calm_events(workers=2, steps=40), *_again(again, 3600)]), "run")
    totals = run.series(None, 100, None)["rates"]["tokens_per_second"]
    measured = [value for value in totals if value is not None]
    assert measured == pytest.approx([2 * TOKENS_PER_STEP] * len(measured)) and 5 < len(measured) < len(totals)


def test_bytes_are_compared_with_the_steps_that_they_average(tmp_path: Path) -> None:
    """Rounds of 20 steps: at step 30, and while it is not over at step 40, one round was sent for 20 steps."""
    run = write_run(tmp_path, calm_events(steps=20))
    after_a_round = Run(run, "run").state()["communication"]
    append(run, *(step(worker, number, None, 20) for number in (30, 40) for worker in range(2)))
    between = Run(run, "run").state()["communication"]
    for name in ("bytes_sent_per_worker", "data_parallel_bytes_per_worker", "reduction"):
        assert between[name] == after_a_round[name], name
    assert between["data_parallel_bytes_per_worker"] == 20 * 4 * PARAMETERS
    assert between["data_parallel_bytes_per_second"] == pytest.approx(4 * PARAMETERS), "a second a step"


def test_a_worker_has_no_rate_before_it_joined_and_after_it_was_lost(tmp_path: Path) -> None:
    """Worker 1, of another machine, is in the rounds 2 to 4 of ten; the curve of all sums those that are there."""
    own = [entry for number in range(10) for entry in [*round_events(number, 2, 20), step(0, 20 * number + 20)]]
    events = sorted((entry for entry in own if entry["worker"] == 0), key=lambda entry: entry["time"])
    for entry in events:
        if entry["type"] == "round" and not 2 <= entry["sequence"] <= 4:
            entry["members"] = entry["members"][:1]
    lost = event("member_lost", 110.0, member=1, peer="p1", label="", reason="silent for 5 s")
    run = Run(write_run(tmp_path, [started(0, 1), *events, lost], engine="swarm"), "run")
    rates = run.series(None, 100, None)["rates"]
    rows = list(zip(rates["seconds"], rates["tokens_per_second"], rates["workers"]["1"]["tokens_per_second"],
                    strict=True))  # fmt: skip
    assert all(other is None for at, _, other in rows if at < 63 or at > 125)
    assert all(other == pytest.approx(TOKENS_PER_STEP) for at, _, other in rows if 70 < at < 100)
    assert all(total == pytest.approx(TOKENS_PER_STEP) for at, total, _ in rows if 30 < at < 60 or at > 125)
    assert all(total == pytest.approx(2 * TOKENS_PER_STEP) for at, total, _ in rows if 70 < at < 100)


def test_a_member_that_was_lost_and_came_back_has_gaps_in_between_and_is_in_no_sum_then(tmp_path: Path) -> None:
    """Worker 1, of another machine, is in the rounds 0 to 2 of ten and from 6 on, with counters that begin anew."""
    own = [entry for number in range(10) for entry in [*round_events(number, 2, 20), step(0, 20 * number + 20)]]
    events = sorted((entry for entry in own if entry["worker"] == 0), key=lambda entry: entry["time"])
    for entry in events:
        if entry["type"] == "round" and 3 <= entry["sequence"] <= 5:
            entry["members"] = entry["members"][:1]
        elif entry["type"] == "round" and entry["sequence"] > 5:
            report, taken = entry["members"][1]["report"], 20 * (entry["sequence"] - 5)
            report |= {"tokens": taken * TOKENS_PER_STEP, "elapsed_seconds": 1.0 * taken, "sync_seconds": 0.0}
    numbers = {"member": 1, "peer": "p1", "label": ""}
    events.append(event("member_lost", 70.0, **numbers, reason="silent for 5 s"))
    events.append(event("member_joined", 125.0, **numbers))
    events.sort(key=lambda entry: entry["time"])
    curves = Run(write_run(tmp_path, [started(0, 1), *events], engine="swarm"), "run").series(None, 100, None)
    rates = curves["rates"]
    rows = list(zip(rates["seconds"], rates["tokens_per_second"], rates["workers"]["1"]["tokens_per_second"],
                    strict=True))  # fmt: skip
    assert all(other is None for at, _, other in rows if 75 < at < 140)
    assert all(total == pytest.approx(TOKENS_PER_STEP) for at, total, _ in rows if 75 < at < 140)
    assert any(total == pytest.approx(2 * TOKENS_PER_STEP) for at, total, _ in rows if at < 60)
    assert any(total == pytest.approx(2 * TOKENS_PER_STEP) for at, total, _ in rows if at > 150)
    own_curve = curves["workers"]["1"]
    drawn = list(zip(own_curve["step"], own_curve["loss"], strict=True))
    assert [at for at, loss in drawn if loss is not None] == [20, 40, 60, 140, 160, 180, 200]
    assert drawn[3] == (140, None)


def test_a_validation_is_drawn_where_it_was_measured_though_it_is_told_with_the_next_round(tmp_path: Path) -> None:
    numbers = event("validation", 43.5, step=20, loss=3.0, perplexity=20.0, tokens=1000)
    events = [
        *(started(0, 1), step(0, 20, interval=20), *round_events(0, 1, 20)),
        *(event("evaluation", 24.0, step=20, loss=3.0, tokens=1000), step(0, 40, interval=20)),
        *(*round_events(1, 1, 20), numbers),
    ]
    run = Run(write_run(tmp_path, events), "run")
    validation = run.series(None, 100, None)["validation"]
    assert validation["step"] == [20] and validation["seconds"] == [24.0]
    assert validation["tokens"] == [20 * TOKENS_PER_STEP] and validation["bytes"] == [1000]
    assert run.state(until=START + 30)["validation"] is None, "nobody knew it yet"


@pytest.mark.parametrize("points", [1, 2, 3])
def test_a_curve_of_one_point_is_no_error(tmp_path: Path, points: int) -> None:
    series = Run(write_run(tmp_path, calm_events()), "run").series(None, points, None)
    assert 1 <= len(series["loss"]["step"]) <= points and series["loss"]["step"][-1] == 100


def test_health_tells_who_is_there_who_is_lost_and_whose_loss_is_no_number(tmp_path: Path) -> None:
    listed = {"where": "", "step": 7, "loss": 3.0, "contributed": 2, "state": "training"}
    events = [
        *(started(0, 1), step(0, 10), event("members", 11.0, present=[listed | {"member": n} for n in (0, 1, 2)])),
        *(event("member_lost", 12.0, member=2, peer="p2", label="", reason="silent for 5 s"), step(0, 20)),
    ]
    run = write_run(tmp_path, events, engine="swarm")
    health = Run(run, "run").state()["health"]
    assert (health["present"], health["all"], health["lost"], health["not_finite"]) == (2, 3, [2], [])
    append(run, step(0, 30) | {"loss": None})
    assert Run(run, "run").state()["health"]["not_finite"] == [0]
    assert Run(run, "run").state(until=START + 25)["health"]["not_finite"] == []
    assert Run(run, "run").state(until=START + 11.5)["health"]["lost"] == []
    append(run, step(0, 40))
    assert Run(run, "run").state()["health"]["not_finite"] == []


def test_a_run_that_has_logged_no_step_says_what_it_is_doing(tmp_path: Path) -> None:
    run = write_run(tmp_path, [started(0, 1)])
    assert Run(run, "run").state()["doing"] == "starting the workers"
    append(run, event("starting", 2.0, doing="validation"))
    assert Run(run, "run").state()["doing"] == "measuring the validation loss before the first step"
    append(run, step(0, 10))
    assert Run(run, "run").state()["doing"] is None


def test_rates_have_no_two_values_at_one_place_on_any_axis(tmp_path: Path) -> None:
    """Two steps are logged far apart, others close together: a moment between them is between their steps."""
    events = [started(0, 1), *(step(0, number) for number in (10, 20, 30, 200, 210, 220))]
    rates = Run(write_run(tmp_path, events), "run").series(None, 100, None)["rates"]
    for axis in ("step", "tokens", "seconds"):
        assert all(after > before for before, after in pairwise(rates[axis])), axis


def test_a_round_that_is_taken_again_after_a_resume_is_drawn_where_it_was_taken(tmp_path: Path) -> None:
    """A stop ends with a round without work, whose number the first round after the resume has again."""
    nothing = {"mean_norm": None, "similarity": None, "cosines": []}
    stopped = [*calm_events(workers=1, steps=40), *round_events(2, 1, 20, **nothing)]
    for entry in stopped[-2:]:
        entry["time"], entry["step"] = START + 45, 40
    resumed = event("resumed", 500.5, step=40, rounds=2, workers=1, new=False, notes=[])
    again = [entry | {"time": entry["time"] + 460} for entry in round_events(2, 1, 20)]
    run = Run(write_run(tmp_path, [*stopped, started(0, 1, 500.0), resumed, *again]), "run")
    last = run.rounds(None, 1)["rounds"][0]
    assert (last["sequence"], last["step"], last["time"]) == (2, 60, again[-1]["time"])
    assert last["workers"][0]["posted"] == again[0]["time"]


def test_the_last_round_of_a_member_is_that_of_the_rounds_and_not_of_the_last_list(tmp_path: Path) -> None:
    listed = {"member": 0, "where": "", "step": 7, "loss": 3.0, "contributed": 0, "state": "training"}
    events = [started(0, 1), *round_events(0, 1, 20), event("members", 24.0, present=[listed]), *round_events(1, 1, 20)]
    [member] = Run(write_run(tmp_path, events, engine="swarm"), "run").state()["members"]
    assert member["contributed"] == 1 and member["joined"] == START, "it was there from its first event on"


def test_a_stopped_run_is_not_complete_while_a_resume_that_has_removed_its_summary_starts(tmp_path: Path) -> None:
    run = write_run(tmp_path, calm_events(steps=40))
    append(run, *(event("worker_finished", 50.0, n, inner_steps=40, stopped_early=True) for n in range(2)))
    assert Run(run, "run").state()["status"] == "stopped"
    append(run, *(event("worker_finished", 51.0, n, inner_steps=40, stopped_early=False) for n in range(2)))
    assert Run(run, "run").state()["status"] == "complete"


def test_a_run_folder_that_has_just_been_made_is_starting(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    (tmp_path / "events.jsonl").unlink()
    state = Run(tmp_path, "run").state()
    assert (state["status"], state["doing"], state["problems"]) == ("starting", "starting the workers", [])
    os.utime(tmp_path / "config.toml", (START, START))
    state = Run(tmp_path, "run").state()
    assert state["status"] == "empty" and "There is no events.jsonl yet" in state["problems"][0]


def test_the_rate_over_bytes_goes_on_after_a_member_was_lost_and_an_ended_swarm_is_as_fast_as_those_that_were_left(
    tmp_path: Path,
) -> None:
    rounds = [
        entry for number in range(10) for entry in [*round_events(number, 2, 20), step(0, 20 * number + 20, None, 20)]
    ]
    events = sorted((entry for entry in rounds if entry["worker"] == 0), key=lambda entry: entry["time"])
    for entry in events:
        if entry["type"] == "round" and entry["sequence"] > 4:
            entry["members"] = entry["members"][:1]
    lost = event("member_lost", 110.0, member=1, peer="p1", label="", reason="silent for 5 s")
    end = event("worker_finished", 204.0, inner_steps=200, tokens=200 * TOKENS_PER_STEP, bytes_sent=10_000)
    run = Run(write_run(tmp_path, [started(0, 1), *events, lost, end], engine="swarm"), "run")
    placed = [at for at in run.series(None, 100, None)["rates"]["bytes"] if at is not None]
    assert placed == sorted(placed) and placed[-1] > 8000
    assert run.state()["tokens_per_second"] == pytest.approx(TOKENS_PER_STEP)
