"""What a person sees of a run, from recorded events: no run, no terminal."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from diloco.cli.display import live
from diloco.cli.display.live import Display, RunView, plain_line, render
from diloco.cli.display.numbers import duration
from diloco.cli.display.report import print_report
from diloco.core.config import SyncConfig
from diloco.history.log import EVENTS_FILE
from diloco.history.run_history import LiveHistory
from diloco.training.checkpoints.manifests import Manifest, Moment, manifest_path, worker_folder
from diloco.training.config.run import RunConfig
from diloco.training.records.summary import Summary, summarize
from support.event_log import Event, history_of

CONFIG = RunConfig(steps=40, sync=SyncConfig(num_inner_steps=10, codec="int8"))


def event(type_: str, worker: int = 0, **fields: Any) -> Event:
    return {"v": 1, "time": 0.0, "worker": worker, "type": type_, **fields}


def started(worker: int) -> Event:
    return event("worker_started", worker, workers=2, parameters=1_630_000, unigram_perplexity=321.0)


def step(worker: int, number: int, loss: float | None, **more: Any) -> Event:
    seconds = {"elapsed_seconds": number / 10, "sync_seconds": number / 40}
    fields = {"tokens": number * 100, "rounds": (number - 1) // 10, "bytes_sent": 5_000_000, **seconds}
    return event("step", worker, step=number, loss=loss, **(fields | more))


def posted(worker: int, sequence: int, number: int) -> Event:
    return event("round_posted", worker, sequence=sequence, fragment=0, step=number)


def merged(worker: int, sequence: int, number: int, **more: Any) -> Event:
    fields: dict[str, Any] = {
        "failure": None,
        "mean_norm": 0.5,
        "similarity": 0.83,
        "codec_error": 0.0051,
        "seconds": 1.25,
        "bytes_sent": 2_000_000,
        "members": [{"worker": 0}, {"worker": 1}],
        "refused": {},
    }
    return event("round", worker, sequence=sequence, step=number, **(fields | more))


BEGINNING = [started(0), started(1), step(0, 10, 4.0), step(1, 10, 5.0)]
FIRST_ROUND = [posted(0, 0, 10), posted(1, 0, 10), merged(0, 0, 10), merged(1, 0, 10)]


def view_of(events: list[Event], config: RunConfig = CONFIG) -> RunView:
    return RunView(config, history_of(events))


def text_of(renderable: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# The view


def test_the_view_is_the_sum_of_the_events() -> None:
    view = view_of([*BEGINNING, *FIRST_ROUND, step(0, 20, 3.0), step(1, 19, 4.0)])
    assert view.step == 19  # the slowest worker's
    assert view.loss == pytest.approx(3.5)
    assert view.tokens_per_second == pytest.approx(2000.0)
    assert view.utilization == pytest.approx(0.75)
    assert view.time_left == pytest.approx(21 / 10)  # ten steps a second, of the slowest worker
    assert (view.merged_rounds, view.failed_rounds, view.present) == (1, 0, 2)
    assert view.last_round is not None
    assert [view.last_round.statistics[name] for name in ("seconds", "similarity")] == [1.25, 0.83]
    assert view.history.parameters == 1_630_000


def test_a_round_is_in_progress_from_its_post_to_its_merge() -> None:
    assert view_of([*BEGINNING, posted(0, 0, 10)]).history.rounds.in_progress == 0
    assert view_of([*BEGINNING, *FIRST_ROUND]).history.rounds.in_progress is None
    assert view_of([*BEGINNING, posted(0, 0, 10)]).workers[0].state == "in a round"


def test_a_failed_round_is_counted_once_and_is_over() -> None:
    failed = [merged(worker, 1, 20, failure="late", members=[], mean_norm=None, bytes_sent=0) for worker in (0, 1)]
    view = view_of([*BEGINNING, *FIRST_ROUND, posted(0, 1, 20), posted(1, 1, 20), *failed])
    assert (view.merged_rounds, view.failed_rounds) == (1, 1)
    assert view.history.rounds.in_progress is None


def test_a_round_in_which_nobody_had_work_is_not_an_outer_step() -> None:
    assert view_of([*BEGINNING, *FIRST_ROUND, merged(0, 1, 10, mean_norm=None)]).merged_rounds == 1


def test_refused_contributions_are_counted_once_and_not_by_every_worker() -> None:
    refusing = [merged(worker, 0, 10, refused={"1": "not finite"}) for worker in (0, 1)]
    assert view_of([*BEGINNING, *refusing]).refused == 1


def test_bytes_are_a_workers_own_sum_and_no_round_counts_twice() -> None:
    events = [*BEGINNING, *FIRST_ROUND]
    assert view_of(events).workers[0].bytes_sent == 7_000_000
    assert view_of([*events, step(0, 20, 3.0, bytes_sent=7_000_000)]).workers[0].bytes_sent == 7_000_000


def test_an_unknown_type_of_event_is_no_error() -> None:
    assert view_of([event("something of tomorrow", 3)]).step == 0


def test_workers_that_finish_or_fail_say_so() -> None:
    view = view_of([*BEGINNING, event("worker_finished", 0, inner_steps=40), event("worker_failed", 1, inner_steps=33)])
    assert [view.workers[worker].state for worker in (0, 1)] == ["done", "failed"]
    assert view.step == 40, "an ended run has come as far as its furthest worker"


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0:00"), (65.4, "1:05"), (3599.6, "1:00:00"), (7384, "2:03:04")]
)
def test_a_duration_reads_as_minutes_or_hours(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


# The display


def test_the_picture_shows_step_loss_workers_members_the_round_and_the_validation() -> None:
    events = [*BEGINNING, *FIRST_ROUND, posted(0, 1, 20), event("validation", step=10, loss=2.0, perplexity=7.39)]
    shown = text_of(render(view_of(events)))
    for part in ("tiny", "1.63M", "H = 10", "int8", "step 10/40", "4.000", "5.000", "2 workers", "10: 7.4", "321"):
        assert part in shown, f"{part}:\n{shown}"
    for part in (
        "round 1 in progress",
        "last took 1.25 s",
        "similarity 0.83",
        "codec error 0.0051",
        "tokens/s",
        "left",
    ):
        assert part in shown, f"{part}:\n{shown}"


def test_between_rounds_the_picture_says_when_the_next_one_is() -> None:
    shown = text_of(render(view_of([*BEGINNING, *FIRST_ROUND, step(0, 13, 3.0), step(1, 13, 3.0)])))
    assert "1 round · next round in 7 steps" in shown


def test_the_picture_of_a_warm_start_says_when_the_first_round_is() -> None:
    config = RunConfig(steps=80, sync=SyncConfig(num_inner_steps=10, warm_start=16))
    shown = text_of(render(view_of(BEGINNING, config)), width=80)
    assert "warm start: averaging gradients up to step 16 · first round after step 26" in shown


def test_after_a_warm_start_rounds_are_counted_from_its_end() -> None:
    config = RunConfig(steps=80, sync=SyncConfig(num_inner_steps=10, warm_start=16))
    shown = text_of(render(view_of([*BEGINNING, step(0, 19, 3.0), step(1, 19, 3.0)], config)))
    assert "next round in 7 steps" in shown


def test_with_fragments_the_picture_does_not_count_whole_rounds() -> None:
    config = RunConfig(steps=80, sync=SyncConfig(num_inner_steps=10, fragments=2))
    assert "every fragment once in 10 steps" in text_of(render(view_of(BEGINNING, config)))


def test_one_member_is_a_member() -> None:
    view = view_of([*BEGINNING, event("worker_failed", 1, inner_steps=10)])
    assert "· 1 member\n" in text_of(render(view)).replace(" \n", "\n")


def test_the_picture_of_the_baseline_speaks_of_gradients() -> None:
    view = view_of([*BEGINNING, step(0, 10, 4.0, rounds=10)], RunConfig(mode="data-parallel", steps=40))
    shown = text_of(render(view))
    assert "averaging gradients at every step · 2 members" in shown
    assert "H =" not in shown
    assert view.merged_rounds == 10


def test_the_picture_fits_80_columns() -> None:
    shown = text_of(render(view_of([*BEGINNING, *FIRST_ROUND])), width=80)
    assert "step 10/40" in shown and "left 0:03" in shown


def test_the_picture_shows_the_run_folder() -> None:
    view = view_of(BEGINNING)
    view.folder = Path("runs/mine")
    assert "run folder: runs/mine" in text_of(render(view))


def test_the_plain_line_has_step_loss_speed_rounds_members_and_time_left() -> None:
    line = plain_line(view_of([*BEGINNING, *FIRST_ROUND]))
    assert line == "step 10/40  loss 4.500  2,000 tokens/s  rounds 1  on rounds 25.0%  members 2  left 0:03"


def followed(tmp_path: Path, events: list[Event]) -> str:
    """What a display without a terminal prints of these events."""
    (tmp_path / EVENTS_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    console = Console(file=io.StringIO(), width=200)
    with Display(console, CONFIG) as display:
        live_history = LiveHistory(tmp_path)
        poll = display.follow(live_history)
        for _ in range(2):
            live_history.refresh()
            poll()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_stop_is_told_once_at_the_next_poll_and_nothing_is_printed_where_a_signal_may_interrupt_a_print(
    tmp_path: Path,
) -> None:
    console = Console(file=io.StringIO(), width=200)
    assert isinstance(console.file, io.StringIO)
    stops: list[bool] = []
    with Display(console, CONFIG) as display:
        poll = display.follow(LiveHistory(tmp_path))
        stop = display.with_stop_message(lambda: stops.append(True))
        before = console.file.getvalue()
        stop()
        stop()
        assert (console.file.getvalue(), stops) == (before, [True, True])
        poll()
        poll()
    assert console.file.getvalue().count(live._STOPPING) == 1


def test_without_a_terminal_each_validation_is_told_once_in_plain_lines(tmp_path: Path) -> None:
    told = followed(tmp_path, [*BEGINNING, event("validation", step=10, loss=2.0, perplexity=7.389)])
    assert told.count("step 10: validation perplexity 7.39") == 1
    assert told.count("step 10/40  loss 4.500") == 1
    assert "\x1b" not in told


def test_without_a_terminal_a_line_is_printed_once_as_long_as_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_PLAIN_SECONDS", 0.0)
    assert followed(tmp_path, BEGINNING).count("step 10/40  loss 4.500") == 1


def test_a_run_that_has_diverged_does_not_break_the_display(tmp_path: Path) -> None:
    diverged = [step(0, 10, None), event("validation", step=10, loss=None, perplexity=None)]
    assert "loss -" in followed(tmp_path, [started(0), *diverged])
    text_of(render(view_of([started(0), *diverged])))


def test_a_folder_whose_name_looks_like_markup_is_printed_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "[bold]run :smile:"
    folder.mkdir()
    assert "[bold]run :smile:" in followed(folder, BEGINNING)


# The report


def summary_of(loss: float | None = 2.0, **changes: Any) -> Summary:
    perplexity = None if loss is None else math.exp(loss)
    numbers: Summary = {
        **summarize(CONFIG, history_of([])),
        "status": "complete",
        "error": None,
        "parameters": 1_630_000,
        "inner_steps": 40,
        "rounds": 4,
        "tokens": 5120,
        "validation_loss": loss,
        "validation_perplexity": perplexity,
        "initial_validation_perplexity": 310.4,
        "validation_step": 40,
        "unigram_perplexity": 27.8,
        "bytes_sent_per_worker": 13_100_000,
        "communication_reduction": 19.9,
        "data_parallel_bytes_per_worker": 261_000_000,
        "compute_utilization": 0.75,
        "anchor_digests": ["aa", "aa"],
        "seconds": 65.0,
        "training_seconds": 50.0,
    }
    return numbers | changes


def reported(folder: Path, summary: Summary, events: list[Event] | None = None) -> str:
    folder.mkdir(exist_ok=True)
    (folder / EVENTS_FILE).write_text("".join(json.dumps(event) + "\n" for event in events or []))
    console = Console(file=io.StringIO(), width=120)
    print_report(console, folder, summary)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_has_perplexity_before_and_after_bytes_utilisation_sample_and_folder(tmp_path: Path) -> None:
    sample = event("sample", prompt="def ", text="f(x): return x")
    shown = reported(tmp_path / "run", summary_of(), [sample])
    for part in (
        *("diloco · complete", "310.4 before", "7.39 after", "unigram model: 27.8", "40 on each of 2 workers"),
        *("4, one every 10 inner steps, int8", "13.1 MB", "261.0 MB for the same steps: 20 times as much", "75.0%"),
        *("aa on all 2 workers", "1:05 (training 0:50)", "def f(x): return x", "run folder:"),
    ):
        assert part in shown, f"{part}:\n{shown}"


def test_the_report_says_in_one_sentence_what_was_saved_and_what_it_cost(tmp_path: Path) -> None:
    [sentence] = [line for line in reported(tmp_path, summary_of()).splitlines() if "fewer bytes" in line]
    assert sentence == (
        "A worker sent 20 times fewer bytes than with data-parallel training (13.1 MB, not 261.0 MB) and spent 12.5 s, "
        "25.0% of its time, on rounds; what that cost in loss, `diloco compare` tells beside a run of "
        "--mode data-parallel."
    )
    for nothing_saved in ({"mode": "data-parallel"}, {"workers": 1}, {"communication_reduction": 0.9}):
        assert "fewer bytes" not in reported(tmp_path, summary_of(**nothing_saved))


def test_the_report_of_a_failed_run_has_no_empty_row_and_no_sentence_on_what_was_saved(tmp_path: Path) -> None:
    shown = reported(tmp_path, summary_of(status="failed", anchor_digests=["", ""]))
    assert "diloco · failed" in shown and "anchors" not in shown and "fewer bytes" not in shown
    assert "anchors" in reported(tmp_path, summary_of(status="failed", anchor_digests=["aa", "bb"]))
    assert "data parallel sends" in shown
    before_its_first_round = summary_of(status="failed", rounds=0, bytes_sent_per_worker=246)
    assert "data parallel sends" not in reported(tmp_path, before_its_first_round)


def test_the_report_says_that_there_was_a_warm_start(tmp_path: Path) -> None:
    shown = reported(tmp_path, summary_of(resolved={"sync.warm_start": 200}))
    assert "the first 200 steps, data-parallel" in shown
    assert "the first step, data-parallel" in reported(tmp_path, summary_of(resolved={"sync.warm_start": 1}))
    assert "warm start" not in reported(tmp_path, summary_of())


def test_few_bytes_are_not_reported_as_none(tmp_path: Path) -> None:
    assert "sent by a worker         12.8 kB" in reported(tmp_path, summary_of(bytes_sent_per_worker=12_776))


def test_the_report_says_what_was_not_measured_and_what_is_not_equal(tmp_path: Path) -> None:
    shown = reported(tmp_path, summary_of(None, anchor_digests=["aa", "bb"], compute_utilization=None))
    assert "not measured" in shown
    assert "different: aa, bb" in shown


def test_a_perplexity_from_before_the_end_says_of_which_step_it_is(tmp_path: Path) -> None:
    assert "7.39 at step 30" in reported(tmp_path, summary_of(validation_step=30, status="failed"))


def test_a_small_reduction_is_not_rounded_away(tmp_path: Path) -> None:
    assert "1.4 times as much" in reported(tmp_path, summary_of(communication_reduction=1.44))
    assert "0.5 times as much" in reported(tmp_path, summary_of(communication_reduction=0.5))


def test_a_sample_is_shown_as_the_model_wrote_it_but_cannot_steer_the_terminal(tmp_path: Path) -> None:
    sample = event("sample", prompt="[bold]", text="a[:x:] \\[red]:smile:[/] \x1b[2J\x07 end")
    shown = reported(tmp_path, summary_of(), [sample])
    assert "[bold]a[:x:] \\[red]:smile:[/] �[2J� end" in shown


def test_the_sample_of_an_earlier_start_is_not_that_of_this_one(tmp_path: Path) -> None:
    before = [started(0), event("sample", prompt="def ", text="of before")]
    assert "def of before" in reported(tmp_path, summary_of(), before)
    assert "def of before" not in reported(tmp_path, summary_of(), [*before, started(0)])


def test_one_worker_is_not_each_of_several(tmp_path: Path) -> None:
    shown = reported(tmp_path, summary_of(workers=1, anchor_digests=["aa"]))
    assert "on each of" not in shown and "on all" not in shown and "aa" in shown


def test_a_run_that_did_not_end_well_says_how_to_go_on_if_it_has_a_checkpoint(tmp_path: Path) -> None:
    line = f"to continue: diloco train --resume {tmp_path}\n"
    assert "to continue" not in reported(tmp_path, summary_of(status="failed"))
    path = manifest_path(worker_folder(tmp_path, 10, 0), 0)
    path.parent.mkdir(parents=True)
    path.write_text(Manifest(Moment(1, 0, 1), 10, 0, 0, 1, {}, 0, {}, {}).text())
    assert reported(tmp_path, summary_of(status="failed")).endswith(line)
    assert reported(tmp_path, summary_of(status="stopped")).endswith(line)
    for in_vain in ("excluded", "loss_not_finite"):  # the swarm would refuse it again; the loss would be the same
        ended = [started(0), event(in_vain, member=0, reason="revoked", step=3, loss="nan")]
        assert "to continue" not in reported(tmp_path, summary_of(status="failed"), ended)
        assert reported(tmp_path, summary_of(status="failed"), [*ended, started(0)]).endswith(line)
    assert "to continue" not in reported(tmp_path, summary_of())
