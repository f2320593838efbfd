"""Whole training runs of workers that come and go, in threads over an elastic engine without a network."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.preparation.corpus_cache import prepare
from diloco.errors import EngineError
from diloco.history.log import EventLog
from diloco.swarm.protocol.status import RunStatus
from diloco.training.checkpoints.resume import newest_start
from diloco.training.config.run import RunConfig
from diloco.training.loop import Training
from diloco.training.swarm.training import SwarmTraining
from support.elastic import ElasticEngine, ElasticSwarm
from support.event_log import Event, read_events
from support.saved_runs import small_config

STEPS, H = 24, 4


def make_run(folder: Path) -> tuple[RunConfig, Corpus]:
    """A text of which no two windows are the same, and a run on it."""
    letters = random.Random(1)
    lines = ["".join(letters.choice("abcdefghijklmnop") for _ in range(60)) for _ in range(800)]
    (folder / "text.txt").write_text("\n".join(lines))
    data = DataConfig(
        source=str(folder / "text.txt"), cache_dir=str(folder / "cache"), vocab_size=280, sequence_length=8, shards=6
    )
    corpus = prepare(data)
    return small_config(data, SyncConfig(num_inner_steps=H), engine="swarm", workers=1, steps=STEPS), corpus


class Member(ElasticEngine):
    """With what a swarm's engine offers besides averaging."""

    @property
    def roster(self) -> tuple[int, ...]:
        return tuple(sorted(self.swarm.live))

    excluded: str | None = None

    def progress(self, **told: float) -> None:
        assert told.keys() == {"inner_steps", "tokens", "loss", "step_seconds", "run_tokens"}

    def fetch_file(self, name: str, path: Path) -> None:
        raise EngineError(f"{name} is at {path} already")

    def status(self) -> RunStatus:
        return RunStatus("", (), None, {}, {})


class Swarm:
    """Trainings in threads; each can be told what to do after a step."""

    def __init__(self, made: tuple[RunConfig, Corpus], folder: Path) -> None:
        self.config, self.corpus = made
        self.folder, self.meeting = folder, ElasticSwarm()
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        self.read: dict[int, list[bytes]] = {}

    def worker(self, number: int, *, resume: bool = False, **after: Callable[[Training], None]) -> Training:
        """`after`: step7=… is called after the worker's step at position 7."""
        self.meeting.engine(number)
        engine = Member(self.meeting, number)
        folder = self.folder / f"machine-{number}"
        folder.mkdir(exist_ok=True)
        log = EventLog(folder, number)
        training = SwarmTraining(self.config, self.corpus, engine, log, torch.device("cpu"), folder, leader=True)
        training.joined = number > 0
        if resume:
            training.resume(newest_start(folder))
        self._watch(training, after)
        return training

    def _watch(self, training: Training, after: dict[str, Callable[[Training], None]]) -> None:
        step, take = training._step, training.reader.next

        def watched(position: int) -> None:
            step(position)
            if f"step{position}" in after:
                after[f"step{position}"](training)

        def noted() -> Any:
            batch = take()
            self.read.setdefault(training.engine.worker, []).extend(row.tobytes() for row in batch)
            return batch

        training._step, training.reader.next = watched, noted  # type: ignore[method-assign]

    def start(self, training: Training) -> None:
        def run() -> None:
            try:
                training.run()
            except BaseException as error:  # noqa: BLE001 - told in the main thread
                self.errors.append(error)
            finally:
                training.engine.close()

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append(thread)
        thread.start()

    def end(self) -> None:
        for thread in self.threads:
            thread.join(200)
            assert not thread.is_alive(), "a worker waits for another"
        if self.errors:
            raise self.errors[0]

    def events(self, number: int, type_: str) -> list[Event]:
        return [event for event in read_events(self.folder / f"machine-{number}") if event["type"] == type_]


def joins_at(swarm: Swarm, step: int, number: int = 1, **after: Callable[[Training], None]) -> dict[str, Any]:
    """Worker `number` joins after worker 0's step there; built in that thread, it is in the next round."""
    return {f"step{step}": lambda _: swarm.start(swarm.worker(number, **after))}
