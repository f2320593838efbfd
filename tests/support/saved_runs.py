"""Whole training runs in threads of this process, which can be interrupted after any step and go on in a new one."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.preparation.corpus_cache import prepare
from diloco.engines.local import LocalSwarm
from diloco.history.log import EventLog
from diloco.models.choice import ModelChoice
from diloco.models.native.presets import PRESETS
from diloco.training.checkpoints.manifests import find_checkpoints, worker_folder
from diloco.training.checkpoints.resume import Start, agree_on_start
from diloco.training.config.run import CheckpointConfig, InnerConfig, RunConfig, TrainingConfig
from diloco.training.loop import Training
from support.event_log import Event, read_events
from support.train_runs import write_text

STEPS, H = 20, 6
MICRO = replace(
    PRESETS["tiny"], hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
)


@contextmanager
def quick_runs() -> Iterator[None]:
    """A model of a few thousand parameters, one thread each, and a disk that never loses power."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "micro", MICRO)
        patch.setattr(os, "fsync", lambda _: None)
        yield
    torch.set_num_threads(before)


def small_corpus(folder: Path) -> tuple[DataConfig, Corpus]:
    data = DataConfig(
        source=str(write_text(folder / "text.txt", 2000)),
        cache_dir=str(folder / "cache"),
        vocab_size=280,
        sequence_length=8,
        shards=6,
    )
    return data, prepare(data)


def small_config(data: DataConfig, sync: SyncConfig, **more: Any) -> RunConfig:
    return RunConfig(
        **{
            "model": ModelChoice("micro"),
            "steps": STEPS,
            "workers": 2,
            "device": "cpu",
            "threads": 1,
            "data": data,
            "sync": sync,
        }
        | {"inner": InnerConfig(lr=1e-2, warmup_steps=3)}
        | {"training": TrainingConfig(batch_size=2, eval_windows=4, eval_interval=6, log_interval=1, sample_tokens=0)}
        | {"checkpoint": CheckpointConfig(interval=3, keep=3, asynchronous=False)}
        | more
    )


class Interrupted(BaseException):
    """Where a kill would have been."""


class Gathering:
    """What torch.distributed does for processes, for threads: the bytes of all."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=200)
        self._said: dict[int, bytes] = {}

    def of(self, worker: int) -> Callable[[bytes], list[bytes]]:
        def gather(data: bytes) -> list[bytes]:
            self._said[worker] = data
            self._barrier.wait()
            everyone = [self._said[one] for one in sorted(self._said)]
            self._barrier.wait()
            return everyone

        return gather


def agreed(folder: Path, workers: int) -> list[Start]:
    """What each of so many workers finds to go on from."""
    gathering = Gathering(workers)
    with ThreadPoolExecutor(workers) as pool:
        waiting = [
            pool.submit(agree_on_start, folder, worker, workers, gathering.of(worker)) for worker in range(workers)
        ]
        return [one.result() for one in waiting]


def train(
    folder: Path,
    config: RunConfig,
    corpus: Corpus,
    *,
    resume: bool = False,
    ends: Mapping[int, int] | None = None,
    stops: Mapping[int, int] | None = None,
) -> list[Training]:
    """Run all workers. `ends`: worker -> step before which it is cut off; `stops`: where Ctrl-C reaches it."""
    folder.mkdir(exist_ok=True)
    starts = agreed(folder, config.workers) if resume else None
    logs = [EventLog(folder, worker) for worker in range(config.workers)]
    engines = LocalSwarm(config.workers).engines()
    workers = [
        Training(
            config,
            corpus,
            engine,
            log,
            torch.device("cpu"),
            folder,
            leader=engine.worker == 0,
            restoring=starts is not None and starts[engine.worker].checkpoint is not None,
        )
        for engine, log in zip(engines, logs, strict=True)
    ]
    for number, worker in enumerate(workers):
        if starts is not None:
            worker.resume(starts[number])
        _interrupt(worker, (ends or {}).get(number), (stops or {}).get(number))
    errors: list[BaseException] = []

    def run(worker: Training) -> None:
        try:
            worker.run()
        except Interrupted:
            pass
        except BaseException as error:  # noqa: BLE001 - told in the main thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a worker waits for another"
    for log in logs:
        log.close()
    if errors:
        raise errors[0]
    return workers


def _interrupt(worker: Training, end: int | None, stop: int | None) -> None:
    step = worker._step

    def interrupted(position: int) -> None:
        if position == end:
            raise Interrupted
        step(position)
        if position + 1 == stop:
            worker.request_stop()

    worker._step = interrupted  # type: ignore[method-assign]


def tensors_of(folder: Path, step: int, worker: int) -> dict[str, Tensor]:
    """Everything that a worker had at that step."""
    return load_file(worker_folder(folder, step, worker) / "rank-0.safetensors")


def numbers_of(folder: Path, step: int, worker: int) -> dict[str, Any]:
    """The same, for what is no tensor, without what a clock has measured or what tells of checkpoints."""
    text = (worker_folder(folder, step, worker) / "rank-0.json").read_text()
    return _without_clocks(json.loads(text)["body"]["state"])


def _without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        odd = ("seconds", "checkpoint_step")
        return {key: _without_clocks(entry) for key, entry in value.items() if not key.endswith(odd)}
    if isinstance(value, list):
        return [_without_clocks(entry) for entry in value]
    return repr(value)  # nan is nan


def assert_same_end(whole: Path, resumed: Path, workers: int = 2, step: int = STEPS) -> None:
    """Bit for bit: everything of every worker before the last rounds, and what was exported after them."""
    for worker in range(workers):
        one, other = (tensors_of(folder, step, worker) for folder in (whole, resumed))
        assert one.keys() == other.keys()
        different = [name for name in one if not torch.equal(one[name].view(-1), other[name].view(-1))]
        assert not different
        assert numbers_of(whole, step, worker) == numbers_of(resumed, step, worker)
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (whole, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def losses(folder: Path, worker: int) -> dict[int, float]:
    """By step, the last that was told of it."""
    return {e["step"]: e["loss"] for e in read_events(folder) if e["type"] == "step" and e["worker"] == worker}


def events_of(folder: Path, type_: str) -> list[Event]:
    """In the order of the workers."""
    return sorted((e for e in read_events(folder) if e["type"] == type_), key=lambda event: event["worker"])


def steps_saved(folder: Path, worker: int) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(folder)[0] if checkpoint.worker == worker]


def with_sync(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, sync=replace(config.sync, **changes))
