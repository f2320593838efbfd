"""Real processes: killed, stopped, resumed, by other numbers of workers and ranks, and one at a time."""

import random
import signal
from pathlib import Path

import pytest

from diloco.run_lock import run_lock
from diloco.training.checkpoints.manifests import find_checkpoints
from support.forks import fork_command
from support.kills import trial
from support.train_runs import SMALL, Run, completed, start, write_text

STEPS = ("--steps=40", "--H=10", "--checkpoint.interval=5")


def resume(folder: Path, *options: str) -> Run:
    return Run(folder, ["train", f"--resume={folder}", *options])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.mark.slow
def test_i5_killed_at_random_moments_and_resumed_each_time_a_run_ends_with_the_bits_of_one_in_peace(
    tmp_path: Path,
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    kills, same = trial(tmp_path, 2, seed, ["--model=tiny", *SMALL], fork_command)
    assert kills and same, (seed, kills)


@pytest.mark.slow
def test_i5_after_ctrl_c_a_run_goes_on_bit_for_bit_and_meanwhile_nobody_else_trains_in_its_folder(
    text: Path, tmp_path: Path
) -> None:
    whole = completed(tmp_path / "whole", text, *STEPS)
    with start(tmp_path / "stopped", text, *STEPS) as stopped:
        stopped.wait_for_step(13)
        stopped.process.send_signal(signal.SIGINT)
        assert stopped.code() == 0 and stopped.summary["status"] == "stopped"
        stopped.assert_nothing_is_left()
    with run_lock(tmp_path / "stopped"), resume(tmp_path / "stopped") as other:
        assert other.code() == 2 and "another process trains in" in other.errors
    with resume(tmp_path / "stopped") as resumed:
        assert resumed.code() == 0, resumed.errors
        assert "continuing from step" in resumed.output
    assert resumed.summary["anchor_digests"] == whole.summary["anchor_digests"]
    assert resumed.summary["validation_loss"] == whole.summary["validation_loss"]
    assert resumed.summary["tokens"] == whole.summary["tokens"] and resumed.summary["resumes"] == 1
    with resume(tmp_path / "stopped") as again:
        assert again.code() == 0 and "is complete with 40 steps" in again.output


@pytest.mark.slow
def test_a_killed_run_of_sharded_workers_falls_back_from_damage_and_goes_on_with_other_ranks(
    text: Path, tmp_path: Path
) -> None:
    with start(tmp_path / "run", text, *STEPS, "--workers=1", "--ranks=2") as run:
        run.wait_until(lambda: len(find_checkpoints(tmp_path / "run")[0]) >= 2, "two checkpoints")
    latest = find_checkpoints(tmp_path / "run")[0][-1]
    damaged = latest.folder / "rank-1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with resume(tmp_path / "run", "--ranks=1", "--workers=2", f"--steps={latest.step + 3}") as resumed:
        assert resumed.code() == 0, resumed.errors
    told = "".join(resumed.output.split())
    assert "".join(f"{damaged}: it has".split()) in told
    assert f"continuingfromstep{latest.step - 5}" in told and "worker1isnew" in told
    assert len(set(resumed.summary["anchor_digests"])) == 1
    with resume(tmp_path / "run", f"--steps={latest.step + 9}") as run:
        for path in (tmp_path / "run" / "checkpoints").rglob("*.safetensors"):
            path.write_bytes(b"")
        assert run.code() == 1
        assert "no checkpoint that all workers can resume from" in " ".join(run.errors.split())
        assert run.errors.startswith("error:")  # and no worker's traceback before it
