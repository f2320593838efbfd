"""`diloco train` with workers of several ranks: the same run as with single ranks, stopped, and killed."""

import os
import signal
from pathlib import Path

import pytest
import torch

from diloco.models.native.model import load_model
from support.forks import fork_ranks
from support.train_runs import Run, completed, start, write_text

pytestmark = pytest.mark.slow

ENDLESS = ("--steps=100000", "--H=5", "--sync.timeout_seconds=100")
SHORT = ("--steps=11", "--H=5", "--sync.codec=fp32", "--training.accumulation=2")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("corpus") / "text.txt")


def test_one_and_two_ranks_with_torchruns_variables_train_as_two_single_ranks_do(tmp_path: Path, text: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with start(tmp_path / "ranks", text, *SHORT, "--ranks=1,2", environment=environment, launch=fork_ranks(3)) as ranks:
        single = completed(tmp_path / "single", text, *SHORT)
        assert ranks.code() == 0, ranks.errors
    assert ranks.summary["status"] == "complete"
    assert ranks.summary["workers"] == 2
    assert len(set(ranks.summary["anchor_digests"])) == 1
    assert ranks.summary["tokens"] == single.summary["tokens"]
    assert ranks.summary["validation_loss"] == pytest.approx(single.summary["validation_loss"], rel=1e-4)
    assert {event["worker"]: event["ranks"] for event in ranks.events if event["type"] == "worker_started"} == {
        0: 1,
        1: 2,
    }
    steps = [(event["worker"], event["step"]) for event in ranks.events if event["type"] == "step"]
    assert sorted(steps) == [(worker, step) for worker in (0, 1) for step in range(1, 12)]
    for mine, theirs in zip(*(load_model(run.folder / "model").parameters() for run in (ranks, single)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=0)


def test_a_stop_of_workers_of_one_and_two_ranks_is_clean_and_the_model_is_whole(tmp_path: Path, text: Path) -> None:
    with start(tmp_path / "run", text, *ENDLESS, "--ranks=1,2", "--compute.sharding=ddp") as run:
        run.wait_for_step(7)
        assert len(run.workers()) == 3
        os.kill(run.process.pid, signal.SIGINT)
        assert run.code() == 0, run.errors
        run.assert_nothing_is_left()
    assert run.errors == ""
    assert run.summary["status"] == "stopped"
    assert len(set(run.summary["anchor_digests"])) == 1
    assert any(event["type"] == "sample" for event in run.events)
    load_model(run.folder / "model")


def test_a_killed_rank_ends_the_run_an_intact_worker_keeps_the_model_and_other_ranks_go_on(
    tmp_path: Path, text: Path
) -> None:
    with start(tmp_path / "run", text, *ENDLESS, "--ranks=2", "--checkpoint.interval=4") as run:
        run.wait_for_step(9)
        os.kill(run.workers()[3], signal.SIGKILL)
        assert run.code() == 1
        run.assert_nothing_is_left()
    assert "worker 1, rank 1, of 2 failed: killed by SIGKILL" in run.errors.splitlines()[-1]
    assert run.summary["status"] == "failed"
    assert run.summary["rounds"] >= 1
    model = load_model(run.folder / "model")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    goes_on_with_other_ranks(run)


def goes_on_with_other_ranks(killed: Run) -> None:
    """From its checkpoints, which two workers of two ranks wrote, as one of one rank and one of two."""
    steps = killed.summary["inner_steps"] + 3
    options = [f"--resume={killed.folder}", "--ranks=1,2", f"--steps={steps}"]
    with Run(killed.folder, ["train", *options]) as resumed:
        assert resumed.code() == 0, resumed.errors
        resumed.assert_nothing_is_left()
    assert resumed.summary["status"] == "complete"
    assert resumed.summary["inner_steps"] == steps
    assert len(set(resumed.summary["anchor_digests"])) == 1
    begins = [event["step"] for event in resumed.events if event["type"] == "resumed"]
    assert begins == [begins[0]] * 2
    assert begins[0] > 0 and begins[0] % 4 == 0
