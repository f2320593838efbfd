"""A sink gets every event once, goes on where it stopped, and may fail without harm."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.sinks.base import Point, Sink
from diloco.sinks.follower import Follower, open_follower, read_state, sink_folder
from support.recorded_runs import RESUMED, RUN, append, event, merged, run_folder, started, step, validation


class Recorder(Sink):
    """Keeps what it is told; refuses the points of some steps."""

    package = "json"
    refused: tuple[int, ...] = ()

    def __init__(self, run: Path, folder: Path) -> None:
        super().__init__(run, folder)
        self.told: list[tuple[object, ...]] = []

    def start(self, config: Mapping[str, object], *, resumed: bool) -> None:
        self.told.append(("start", config["steps"], config["sync.codec"], resumed))

    def write(self, points: Sequence[Point]) -> None:
        if points[0].step in self.refused:
            raise ConnectionError(f"the server is away\nat step {points[0].step}")
        self.told += [("point", point.label, point.step, point.value) for point in points]

    def rewind(self, worker: int | None, step: int) -> None:
        self.told.append(("rewind", worker, step))

    def finish(self, summary: Mapping[str, object]) -> None:
        self.told.append(("finish", summary["status"]))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.told.append(("close",))


class Unreliable(Recorder):
    refused = (10,)


def losses(follower: Follower) -> list[tuple[object, ...]]:
    assert isinstance(follower.sink, Recorder)
    return [entry[2:] for entry in follower.sink.told if entry[1:2] == ("train/loss/worker_0",)]


def test_a_run_after_the_fact_goes_from_its_options_over_its_points_to_its_summary(tmp_path: Path) -> None:
    run = run_folder(tmp_path, RUN)
    with open_follower(run, "recorder", Recorder) as follower:
        assert follower.catch_up() == len(RUN)
        assert follower.catch_up() == 0
    assert isinstance(follower.sink, Recorder)
    assert follower.sink.told[0] == ("start", 40, "fp16", False)
    assert losses(follower) == [(10, 4.0), (20, 3.0)]
    assert follower.sink.told[-2:] == [("finish", "failed"), ("close",)]
    assert read_state(run, "recorder").events == len(RUN)


def test_events_that_come_later_are_written_when_they_come(tmp_path: Path) -> None:
    run = run_folder(tmp_path, RUN[:4], ended=False)
    with open_follower(run, "recorder", Recorder) as follower:
        follower.catch_up()
        assert losses(follower) == [(10, 4.0)]
        append(run, RUN[4:])
        follower.catch_up()
        assert losses(follower) == [(10, 4.0), (20, 3.0)]
    assert isinstance(follower.sink, Recorder)
    assert follower.sink.told[-1] == ("close",)  # no summary: the run has not ended


def test_a_second_time_it_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    run = run_folder(tmp_path, RUN[:4], ended=False)
    with open_follower(run, "recorder", Recorder):
        pass
    append(run, RUN[4:])
    with open_follower(run, "recorder", Recorder) as follower:
        pass
    assert isinstance(follower.sink, Recorder)
    assert follower.sink.told[0] == ("start", 40, "fp16", True)
    assert losses(follower) == [(20, 3.0)]
    assert not [entry for entry in follower.sink.told if entry[0] == "rewind"]


@pytest.mark.parametrize("seen_before", [0, len(RUN)], ids=["in one go", "in two sessions"])
def test_after_a_resume_each_worker_is_rewound_once_before_its_first_repeated_step(
    tmp_path: Path, seen_before: int
) -> None:
    run = run_folder(tmp_path, RUN, ended=False)
    if seen_before:
        with open_follower(run, "recorder", Recorder):
            pass
    append(run, RESUMED)
    with open_follower(run, "recorder", Recorder) as follower:
        pass
    assert isinstance(follower.sink, Recorder)
    rewinds = [entry[1:] for entry in follower.sink.told if entry[0] == "rewind"]
    assert sorted(rewinds, key=str) == [(0, 20), (1, 20), (None, 20)]
    position = follower.sink.told.index(("rewind", 0, 20))
    assert follower.sink.told[position + 1 :][0] == ("point", "train/loss/worker_0", 20, 2.5)


def test_a_worker_that_starts_late_takes_nothing_back_from_the_others(tmp_path: Path) -> None:
    again = [started(0), step(0, 20, 2.5), merged(0, 1, 20), started(1), validation(20, 2.0), step(0, 30, 2.0)]
    run = run_folder(tmp_path, [*RUN, *again, step(1, 20, 2.75)], ended=False)
    with open_follower(run, "recorder", Recorder) as follower:
        pass
    assert isinstance(follower.sink, Recorder)
    rewinds = [entry[1:] for entry in follower.sink.told if entry[0] == "rewind"]
    assert rewinds == [(0, 20), (None, 20), (1, 20)]


def test_an_event_that_the_sink_refuses_is_counted_told_of_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_folder(tmp_path, RUN)
    with caplog.at_level(logging.ERROR), open_follower(run, "unreliable", Unreliable) as follower:
        follower.catch_up()
    assert losses(follower) == [(20, 3.0)]
    state = read_state(run, "unreliable")
    assert (state.events, state.lost) == (len(RUN), 5)  # two steps, two rounds and a validation at step 10
    assert state.error == "ConnectionError: the server is away"
    assert len(caplog.records) == 1


def test_an_event_of_another_version_is_counted_and_the_rest_is_written(tmp_path: Path) -> None:
    run = run_folder(tmp_path, [event("step"), step(0, 10, 4.0)], ended=False)
    with open_follower(run, "recorder", Recorder) as follower:
        follower.catch_up()
    assert losses(follower) == [(10, 4.0)]
    assert read_state(run, "recorder").lost == 1


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path, RUN)
    with (
        open_follower(run, "recorder", Recorder),
        pytest.raises(ConfigError, match="another process"),
        open_follower(run, "recorder", Recorder),
    ):
        pass


def test_a_damaged_state_starts_anew(tmp_path: Path) -> None:
    run = run_folder(tmp_path, RUN)
    sink_folder(run, "recorder").mkdir(parents=True)
    (sink_folder(run, "recorder") / "state.json").write_text(json.dumps({"unknown": 1}))
    assert read_state(run, "recorder").events == 0
