"""`sync.asynchronous` in whole training runs: the end, the counts, and a resumed run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.core.config import OuterConfig, SyncConfig
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.errors import ConfigError
from diloco.training.config.run import RunConfig
from diloco.training.records.summary import write_summary
from support.saved_runs import STEPS, H, events_of, quick_runs, small_config, small_corpus, train

ASYNC = SyncConfig(H, "fp16", asynchronous=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DataConfig, Corpus]]:
    with quick_runs():
        yield small_corpus(tmp_path_factory.mktemp("data"))


def assert_good_end(folder: Path, config: RunConfig) -> None:
    summary = write_summary(folder, config)
    assert summary["status"] == "complete" and summary["rounds_failed"] == 0
    assert summary["tokens"] == 2 * STEPS * config.tokens_per_step
    assert len(summary["anchor_digests"]) == 2 and len(set(summary["anchor_digests"])) == 1
    assert [event["step"] for event in events_of(folder, "validation")][-1] == STEPS
    assert summary["rounds"] == events_of(folder, "worker_finished")[1]["rounds"]


def test_a_run_ends_with_one_model_and_every_step_in_it(data: tuple[DataConfig, Corpus], tmp_path: Path) -> None:
    config = small_config(data[0], ASYNC)
    train(tmp_path, config, data[1])
    assert_good_end(tmp_path, config)
    assert write_summary(tmp_path, config)["rounds"] == 2 * (STEPS // H + 1)


def test_a_killed_run_goes_on_to_its_end(data: tuple[DataConfig, Corpus], tmp_path: Path) -> None:
    config = small_config(data[0], ASYNC)
    train(tmp_path, config, data[1], ends={0: 14, 1: 8})
    train(tmp_path, config, data[1], resume=True)
    assert [event["step"] for event in events_of(tmp_path, "resumed")] == [9, 6]
    assert_good_end(tmp_path, config)


def test_a_stop_of_one_worker_ends_all_with_one_model(data: tuple[DataConfig, Corpus], tmp_path: Path) -> None:
    config = small_config(data[0], ASYNC, steps=10_000)
    train(tmp_path, config, data[1], stops={1: 8})
    ended = events_of(tmp_path, "worker_finished")
    assert ended[0]["anchor_digest"] == ended[1]["anchor_digest"]
    assert all(event["stopped_early"] for event in ended)


def test_what_does_not_go_together_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="engine = swarm: it is for a fixed set of workers"):
        RunConfig(engine="swarm", sync=ASYNC)
    with pytest.raises(ConfigError, match="ranks = 2: it is for a fixed set of workers"):
        RunConfig(ranks="2", sync=ASYNC)
    with pytest.raises(ConfigError, match=r"outer\.optimizer = sgd"):
        RunConfig(outer=OuterConfig("sgd"), sync=ASYNC)
