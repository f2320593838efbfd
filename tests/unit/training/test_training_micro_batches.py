"""The micro-batches of a step, where only the batch is given: one on the CPU, as few as fit on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.cli.display.sizes import size_lines
from diloco.data.config import DataConfig
from diloco.data.preparation.corpus_cache import prepare
from diloco.engines.local import alone
from diloco.errors import ConfigError
from diloco.history.log import EventLog
from diloco.models.choice import ModelChoice
from diloco.training import loop, micro_batches
from diloco.training.config.run import RunConfig, TrainingConfig
from diloco.training.loop import Training
from diloco.training.micro_batches import choices, estimated, fewest_that_fit
from diloco.training.sizes.estimate import estimate
from diloco.training.sizes.memory import ACTIVATIONS, Placement
from support.event_log import history_of, read_events

FIXED = 100


class Gpu:
    """A step needs FIXED bytes and `row` for each of a micro-batch's rows; `most`: there is no more memory."""

    def __init__(self, rows: int, row: int, most: int = 10**9) -> None:
        self._rows, self._row, self._most = rows, row, most
        self.tried: list[int] = []

    def __call__(self, count: int) -> int | None:
        self.tried.append(count)
        used = FIXED + self._row * self._rows // count
        return used if used <= self._most else None


def test_every_even_cut_of_a_batch_can_be_chosen() -> None:
    assert choices(12) == [1, 2, 3, 4, 6, 12]
    assert choices(12, ranks=2) == [1, 2, 3, 6]


@pytest.mark.parametrize("start", [1, 2, 4, 8, 16])
def test_the_largest_micro_batch_that_fits_is_found_wherever_the_estimate_begins(start: int) -> None:
    assert fewest_that_fit(choices(16), start, Gpu(16, 10), FIXED, budget=FIXED + 40) == 4
    assert fewest_that_fit(choices(16), start, Gpu(16, 10, most=FIXED + 40), FIXED, budget=10**6) == 4


def test_what_is_bound_to_fail_is_not_tried() -> None:
    gpu = Gpu(16, 10)
    fewest_that_fit(choices(16), 4, gpu, FIXED, budget=FIXED + 40)
    assert gpu.tried == [4]


def test_a_step_that_fits_in_no_way_is_refused_with_remedies() -> None:
    with pytest.raises(ConfigError, match=r"one sequence at a time: try --compute\.checkpoint_activations true"):
        fewest_that_fit(choices(4), 1, Gpu(4, 10), FIXED, budget=FIXED)
    assert estimated(choices(4), 40, FIXED, FIXED) == 4


def _config(folder: Path, **training: Any) -> RunConfig:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    data = DataConfig(
        source=str(text), vocab_size=300, sequence_length=8, shards=1, validation_fraction=0.1, cache_dir=str(folder)
    )
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    return RunConfig(
        workers=1,
        steps=2,
        model=ModelChoice(**shape, head_dim=8),
        data=data,
        training=TrainingConfig(batch_size=8, eval_windows=4, sample_tokens=0, **training),
    )


def _training(folder: Path, **training: Any) -> Training:
    config = _config(folder, **training)
    return Training(
        config, prepare(config.data), alone(), EventLog(folder, 0), torch.device("cpu"), folder, leader=True
    )


def test_on_the_cpu_a_step_is_one_micro_batch_unless_another_number_is_given(tmp_path: Path) -> None:
    training = _training(tmp_path)
    assert training.accumulation == 1
    training.run()
    [started] = [event for event in read_events(tmp_path) if event["type"] == "worker_started"]
    assert started["resolved"]["training.accumulation"] == 1
    assert _training(tmp_path, accumulation=4).accumulation == 4


def test_on_a_gpu_trials_decide_and_an_event_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = _training(tmp_path)
    training.device = torch.device("cuda")
    placement = Placement(1, 1, cuda=True, precision=training.precision.name)
    _, gradients, rest = micro_batches._estimated_memory(
        training.config, placement, training.model, training.corpus.vocab_size, training.device
    )
    tried: list[int] = []

    def trial(_: object, __: object, rows: int, length: int, ___: object) -> int | None:
        assert length == 8
        tried.append(rows)
        return gradients + 1000 * rows

    monkeypatch.setattr(micro_batches, "trial_bytes", trial)
    monkeypatch.setattr(loop, "budget_bytes", lambda *_: gradients + rest + 2500)
    assert training._micro_batches(1) == 4 and 2 in tried
    [event] = [event for event in read_events(tmp_path) if event["type"] == "micro_batches"]
    assert (event["accumulation"], event["rows"], event["tried"]) == (4, 2, True)
    assert history_of([event]).notes.lines == [
        "a step is computed in 4 micro-batches of 2 sequences: the most that fit the GPU's memory, found by trying"
    ]
    training.config = replace(training.config, training=replace(training.config.training, accumulation=2))
    assert training._micro_batches(1) == 2  # as given, and nothing is tried


def test_the_estimate_tells_how_a_step_is_cut(tmp_path: Path) -> None:
    config = _config(tmp_path)
    place = Placement(2, cuda=True)
    whole = estimate(config, 300, place, processes=1, folder=tmp_path)
    activations = whole.device_memory[ACTIVATIONS]
    budget = sum(whole.device_memory.values()) - activations + activations / 2
    cut = estimate(config, 300, place, processes=1, folder=tmp_path, device_budget=budget)
    assert (cut.accumulation, cut.micro_batch_rows) == (2, 4)
    assert sum(cut.device_memory.values()) <= budget
    assert "; a step is 2 times 4 sequences" in size_lines(cut.as_json())[0]
    here = estimate(config, 300, Placement(2), processes=1, folder=tmp_path)
    assert "; a step is 8 sequences at once" in size_lines(here.as_json())[0]
