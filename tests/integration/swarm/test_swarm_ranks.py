"""Workers of one and of two ranks in one swarm, by its commands: a rank that dies takes its worker out, not the swarm,
and the worker comes back."""

import os
import re
import signal
from pathlib import Path

import pytest

from support.torchrun import Torchrun
from support.train_runs import Run, start, write_text

EXAMPLE = Path(__file__).parents[3] / "examples" / "swarm_fsdp_loop.py"

ENDLESS = ("--engine=swarm", "--host=127.0.0.1", "--steps=100000", "--H=10", "--checkpoint.interval=10")
TWO = ("--ranks=2", "--device=cpu", "--threads=1", "--host=127.0.0.1", "--checkpoint.interval=10")


def join(folder: Path, word: str, *options: str) -> Run:
    file = folder.parent / f"{folder.name}.word"
    file.write_text(word)
    here = (f"--out={folder}", f"--data.cache_dir={folder.parent / 'other-cache'}")
    return Run(folder, ["join", f"@{file}", *here, *TWO, *options])


def invitations(run: Run) -> list[str]:
    return re.findall(r"diloco2\w+", run.output)


def rounds_of(run: Run, contributors: list[int], after: int = -1) -> list[int]:
    """The numbers of the rounds with exactly these contributions, as a run has seen them."""
    rounds = [event for event in run.events if event["type"] == "round" and event["sequence"] > after]
    return [event["sequence"] for event in rounds if event["contributors"] == contributors]


def last_round(run: Run) -> int:
    return max((event["sequence"] for event in run.events if event["type"] == "round"), default=-1)


@pytest.mark.slow
def test_workers_of_one_and_two_ranks_lose_a_rank_and_get_it_back_and_one_resumes_alone(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    with start(tmp_path / "first", text, *ENDLESS, "--swarm.seats=2") as first:
        first.wait_until(lambda: len(invitations(first)) == 2, "two invitations")
        words = invitations(first)
        with (
            join(tmp_path / "second", words[0]) as second,
            join(tmp_path / "third", words[1], "--compute.sharding=ddp") as third,
        ):
            for run in (first, second, third):
                run.wait_until(lambda run=run: rounds_of(run, [0, 1, 2]), "a round of all three")
            digests = [
                {member["anchor_digest"] for member in event["members"]}
                for run in (first, second, third)
                for event in run.events
                if event["type"] == "round"
            ]
            assert all(len(agreed) == 1 for agreed in digests)

            killed_at = last_round(first)
            os.kill(second.workers()[1], signal.SIGKILL)
            second.wait_until(lambda: "it is started again (1 of at most" in second.output, "a second start")
            again = last_round(first)
            assert rounds_of(first, [0, 1, 2]) and first.process.poll() is None and third.process.poll() is None
            first.wait_until(lambda: rounds_of(first, [0, 1, 2], after=again + 1), "a round of all three again")
            assert last_round(first) > killed_at

            for run in (first, third, second):
                run.process.send_signal(signal.SIGINT)
                assert run.code() == 0, run.errors
    steps = sorted(int(folder.name.removeprefix("step-")) for folder in (tmp_path / "second/checkpoints").iterdir())
    with Run(tmp_path / "second", ["train", f"--resume={tmp_path / 'second'}"]) as resumed:
        before = last_round(resumed)
        resumed.wait_until(lambda: last_round(resumed) > before + 1, "rounds of the worker alone")
        resumed.process.send_signal(signal.SIGINT)
        assert resumed.code() == 0, resumed.errors
    [event] = [event for event in resumed.events if event["type"] == "resumed"]
    assert event["step"] == steps[-1] > 0


@pytest.mark.slow
def test_an_own_loop_with_fsdp2_inside_starts_a_swarm_under_torchrun(tmp_path: Path) -> None:
    output = Torchrun(EXAMPLE, 2, tmp_path).wait()
    ends = re.findall(r"worker (\d) rank (\d)  final loss ([\d.]+)  parameters ([0-9a-f]{16})", output)
    assert sorted((worker, rank) for worker, rank, _, _ in ends) == [("0", "0"), ("0", "1")]
    assert len({(loss, digest) for _, _, loss, digest in ends}) == 1
    assert float(ends[0][2]) < 0.5  # the targets' variance is about 3
