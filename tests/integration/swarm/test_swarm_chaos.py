"""Real workers are killed, frozen, lied to, joined and called on by a stranger, while they train.

Every wait is for something that must happen sooner or later, with a generous bound; how soon depends on the machine.
What is asserted at the end holds at every moment: one state after a round, one mean, no work lost or counted twice, no
lie in a mean, no stranger let in. `benchmarks/chaos.py` does the same at random moments, and looks at the loss too.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.chaos.story import Chronicle, Lives
from support.chaos.stranger import intrude
from support.chaos.worker import Task, train
from support.swarm.processes import Worker, Workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG = 300.0
"""Seconds for what takes a few on an idle machine."""
ENDLESS = 100_000


class Swarm:
    """Workers by the name of their machine, and what they have written down."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.stories = workers, list[Path]()

    def task(self, life: str, lie: str = "") -> Task:
        self.stories.append(self.workers.folder / f"{life}.jsonl")
        return Task(ENDLESS, self.stories[-1], life, step_seconds=0.03, lie=lie)

    def start(self, machine: str, life: str, lie: str = "") -> Worker:
        """It trains as soon as it can."""
        worker = self.workers.start(machine, train, self.task(life, lie))
        worker.say("go")
        return worker

    def start_honest(self, **lives: str) -> list[Worker]:
        """One on each machine, by the name of its life; waits until the work of each is in a mean."""
        workers = [self.start(machine, life) for machine, life in lives.items()]
        for life in lives.values():
            self.wait_until(lambda life=life: self.contributes(life), f"work of {life} in a mean")  # type: ignore[misc]
        return workers

    @property
    def chronicle(self) -> Chronicle:
        return Chronicle(self.stories)

    def number(self, life: str) -> int | None:
        return next((line["number"] for line in self.chronicle.of("start", frozenset([life]))), None)

    def contributes(self, life: str, after: int = -1) -> bool:
        """Its work is in the mean of a later round."""
        return any(
            str(self.number(life)) in line["weights"]
            for line in self.chronicle.of("round")
            if line["failure"] is None and line["round"] > after
        )

    def trains_on(self, life: str) -> None:
        after = self.chronicle.ended()
        self.wait_until(lambda: self.contributes(life, after), f"work of {life} in a mean after round {after}")

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LONG
        while not happened():
            assert time.monotonic() < deadline, f"{what}: not within {LONG:g} s; {self.errors()}"
            time.sleep(0.1)

    def errors(self) -> list[str]:
        return [f"{line['life']}: {line['text']}" for line in self.chronicle.of("error")]

    def banned(self, life: str) -> bool:
        events = [line["fields"]["number"] for line in self.chronicle.of("event") if line["type"] == "member_banned"]
        return self.number(life) in events


def test_whatever_is_done_to_its_workers_the_swarm_trains_on_as_one(tmp_path: Path) -> None:
    with Workers(tmp_path, lost_seconds=2.0, beat_seconds=0.4) as workers:
        swarm = Swarm(workers)
        (first,) = swarm.start_honest(first="first")
        second, _ = swarm.start_honest(second="second", third="third")

        liars = {lie: swarm.start(lie, lie, lie) for lie in ("nan", "huge")}
        for lie in liars:
            swarm.wait_until(lambda lie=lie: swarm.banned(lie), f"a ban of {lie}")
        stranger = workers.start("stranger", intrude, swarm.task("stranger"), workers.key.run_id, workers.addresses())
        swarm.wait_until(lambda: not stranger.alive, "the stranger to have tried everything")

        first.kill()
        swarm.trains_on("third")
        second.freeze()
        swarm.trains_on("third")
        second.thaw()
        swarm.trains_on("second")
        sidecar = second.sidecar()
        assert sidecar is not None
        os.kill(sidecar, signal.SIGKILL)
        swarm.trains_on("second")
        swarm.start_honest(first="first, again", fourth="fourth")

        liars["nan"].kill()
        again = swarm.start("nan", "nan, again", "nan")
        swarm.wait_until(lambda: not again.alive, "the banned liar to be turned away")
        shutil.copytree(tmp_path / "third" / "swarm", tmp_path / "copy" / "swarm")
        copy = swarm.start("copy", "third, a second time")
        swarm.wait_until(lambda: not copy.alive, "the second process of one identity to be turned away")
        assert any("another process with the identity of this worker" in error for error in swarm.errors())
        swarm.trains_on("third")

        uninvited = frozenset(["stranger", "nan, again", "third, a second time"])
        assert swarm.chronicle.broken_rules(Lives(frozenset(liars), uninvited)) == []
        assert swarm.number("first, again") == swarm.number("first")
