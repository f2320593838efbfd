"""A resume that is refused leaves the run folder as it was; what a resume says of where it goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.cli.main import run
from diloco.core.config import SyncConfig
from diloco.data.corpus import Corpus
from diloco.errors import CheckpointError
from diloco.history.events import WorkerFinishedEvent
from diloco.history.log import EventLog
from diloco.models.choice import ModelChoice
from diloco.outer.tensors import pieces_of
from diloco.training.checkpoints.resume import check_resumable
from diloco.training.checkpoints.store import CheckpointOwner, CheckpointStore
from diloco.training.config.run import CheckpointConfig, RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.records.summary import write_summary
from support.event_log import history_of
from support.saved_runs import agreed, small_config, small_corpus
from support.train_runs import write_text


@pytest.fixture
def config(tmp_path: Path) -> tuple[RunConfig, Corpus]:
    data, corpus = small_corpus(tmp_path)
    return small_config(data, SyncConfig(3), model=ModelChoice("tiny"), steps=9), corpus


@pytest.fixture
def ended(tmp_path: Path, config: tuple[RunConfig, Corpus]) -> Path:
    """The folder of a run that has come to its end, so far without a checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config[0]))
    for worker in range(2):
        log = EventLog(folder, worker)
        log.emit(WorkerFinishedEvent(inner_steps=9, stopped_early=False, rounds=3, rounds_failed=0, bytes_sent=0))
        log.close()
    write_summary(folder, config[0])
    return folder


def save(folder: Path, worker: int, config: RunConfig, corpus: Corpus) -> None:
    lasting = config.lasting(corpus.digest, "a model")
    own = CheckpointConfig(asynchronous=False)
    checkpoints = CheckpointStore(folder, CheckpointOwner(worker, 2), own, lasting, lambda *_, **__: None)
    checkpoints.save(9, 3, {"w": pieces_of(torch.zeros(2))}, {})


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}


def test_a_refused_resume_changes_nothing_in_the_run_folder(
    ended: Path, config: tuple[RunConfig, Corpus], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for worker in range(2):
        save(ended, worker, *config)
    before = content(ended)
    other = write_text(tmp_path / "other.txt", 1900)
    for options, message in (
        (["--steps=5"], "is at step 9 already: give --steps at least that"),
        (["--steps=12", f"--data.source={other}"], "was saved with corpus = "),
    ):
        (ended / "summary.json").unlink()  # it would be complete with 5 steps
        assert run(["train", f"--resume={ended}", *options]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        (ended / "summary.json").write_bytes(before[ended / "summary.json"])
        assert content(ended) == before
    check_resumable(ended, range(2), replace(config[0], steps=12), config[1].digest)


def test_a_run_that_has_ended_without_a_checkpoint_does_not_begin_again(
    ended: Path, config: tuple[RunConfig, Corpus], capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(ended)
    assert run(["train", f"--resume={ended}", "--steps=12"]) == 1
    assert "has ended after 9 inner steps and has no checkpoint" in " ".join(capsys.readouterr().err.split())
    assert content(ended) == before
    save(ended, 0, *config)  # but worker 1 could not
    for refused in (lambda: check_resumable(ended, range(2), *config_and_digest(config)), lambda: agreed(ended, 2)):
        with pytest.raises(CheckpointError, match="to start again at the first step would replace its model"):
            refused()


def config_and_digest(config: tuple[RunConfig, Corpus]) -> tuple[RunConfig, str]:
    return config[0], config[1].digest


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(
    ended: Path, config: tuple[RunConfig, Corpus]
) -> None:
    lines = (ended / "events.jsonl").read_text().replace("worker_finished", "round_posted")
    (ended / "events.jsonl").write_text(lines)
    check_resumable(ended, range(2), *config_and_digest(config))
    assert [start.checkpoint for start in agreed(ended, 2)] == [None, None]


@pytest.mark.parametrize(("workers_before", "said"), [(2, ["continuing from step 6", "a note"]), (None, ["a note"])])
def test_a_run_goes_on_or_begins_again_but_never_says_both(workers_before: int | None, said: list[str]) -> None:
    told = {"step": 6 if workers_before else 0, "rounds": 1, "workers": 2, "workers_before": workers_before}
    resumed = {"v": 1, "time": 0.0, "worker": 0, "type": "resumed", "new": False, "notes": ["a note"], **told}
    assert history_of([resumed]).notes.lines == said
