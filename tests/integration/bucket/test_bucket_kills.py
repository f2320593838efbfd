"""kill -9 of a worker at each step of a round: the others end the round, and it comes back under its number."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.bucket import records
from diloco.bucket.engine import BucketEngine
from diloco.bucket.store import Buffer, ObjectStore
from diloco.engines.rounds import GlobalState
from support.bucket import SMALL_CHUNK_BYTES, bucket_settings
from support.forks import context
from support.rounds import average, decoded, plain_mean

pytestmark = pytest.mark.slow
STEPS = ["after its post", "after the plan", "before its range of the mean"]
SECONDS = 100.0


class DyingStore(ObjectStore):
    """Ends its process at one step of round 1."""

    step = ""

    async def create(self, name: str, data: Buffer) -> bool:
        if self.step == "before its range of the mean" and name.startswith("rounds/0000000001/mean"):
            self._die()
        created = await super().create(name, data)
        if self.step == "after its post" and name.startswith("rounds/0000000001/post"):
            self._die()
        return created

    async def read(self, name: str) -> bytes | None:
        if self.step == "after the plan" and name == "rounds/0000000001/plan":
            self._die()
        return await super().read(name)

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def work(url: str, folder: Path, step: str, pipe: Connection) -> None:
    """Do what the test asks for, until it closes the pipe."""
    torch.set_num_threads(1)
    records._LEAST_CHUNK_BYTES = SMALL_CHUNK_BYTES  # all workers have a range of the mean
    store = DyingStore(url)
    store.step = step
    engine = BucketEngine(bucket_settings(url, folder, late_seconds=0.5, patience=1000.0), store=store)
    sequence = 0
    engine.serve_state(lambda: GlobalState({"x": torch.zeros(3)}, {"sequence": sequence}, "same"))
    state = engine.fetch_state()
    if state is not None:
        sequence = state.numbers["sequence"]
    pipe.send((engine.worker, [] if state is None else [key.sequence for key, _ in state.means], sequence))
    while (asked := pipe.recv()) != "end":
        if isinstance(asked, int):
            sequence = asked
            result = average(engine, asked, SECONDS)
            pipe.send((decoded(result), result.contributors, result.mean_digest))
        else:
            pipe.send(engine.roster)
    engine.close()


class Worker:
    def __init__(self, folder: Path, name: str, step: str = "") -> None:
        self.pipe, theirs = context.Pipe()
        given = (f"file://{folder}/bucket", folder / name, step, theirs)
        self.process = context.Process(target=work, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self.number, self.means, self.sequence = self.heard()

    def heard(self) -> Any:
        assert self.pipe.poll(SECONDS), "the worker does not answer"
        return self.pipe.recv()

    def ends(self) -> int | None:
        self.process.join(SECONDS)
        return self.process.exitcode


@contextmanager
def ended_at_last(workers: list[Worker]) -> Iterator[None]:
    try:
        yield
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def settle(workers: list[Worker]) -> None:
    """Until all know that the others have the state."""
    while True:
        for worker in workers:
            worker.pipe.send("roster")
        rosters = [worker.heard() for worker in workers]
        if all(len(roster) == len(workers) for roster in rosters):
            return


def together(workers: list[Worker], sequence: int) -> list[Any]:
    for worker in workers:
        worker.pipe.send(sequence)
    return [worker.heard() for worker in workers]


@pytest.mark.parametrize("step", STEPS)
def test_a_worker_is_killed_and_the_others_end_the_round_with_its_work_and_it_comes_back(
    step: str, tmp_path: Path
) -> None:
    everyone = [Worker(tmp_path, name, step if name == "a" else "") for name in "abc"]
    with ended_at_last(everyone):
        victim, *others = everyone
        settle(everyone)
        assert len({digest for _, _, digest in together(everyone, 0)}) == 1
        victim.pipe.send(1)
        for mean, contributors, _ in together(others, 1):
            assert contributors == (0, 1, 2) and mean == plain_mean(0, 1, 2).tolist()
        assert victim.ends() == -signal.SIGKILL
        everyone[0] = again = Worker(tmp_path, "a")
        assert again.number == victim.number == 0
        assert again.means[-1] == 1 and again.sequence == 2, "it has the round in which it died from the bucket"
        settle(everyone)
        outcomes = together(everyone, 2)
        assert {contributors for _, contributors, _ in outcomes} == {(0, 1, 2)}
        assert len({digest for _, _, digest in outcomes}) == 1
        for worker in everyone:
            worker.pipe.send("end")
            assert worker.ends() == 0


def test_workers_that_start_at_once_get_numbers_of_their_own_and_follow_one_plan(tmp_path: Path) -> None:
    everyone = [Worker(tmp_path, name) for name in "ab"]
    with ended_at_last(everyone):
        settle(everyone)
        assert sorted(worker.number for worker in everyone) == [0, 1]
        for sequence in range(5):
            assert len({digest for _, _, digest in together(everyone, sequence)}) == 1
