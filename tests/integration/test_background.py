"""Overlapped rounds on a CPU: the arithmetic runs in threads beside training, and no bit depends on that."""

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.core.config import SyncConfig
from diloco.core.digest import digest
from diloco.core.fragments import Fragment
from diloco.core.outer_optimizers import Nesterov
from diloco.engines.local import alone
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.outer import background
from diloco.outer import loop as outer_loop
from diloco.outer.background import BackgroundReplica
from diloco.outer.replica import Lane, OneRankReplica
from support.in_turn import InTurn
from support.problem import build
from support.processes import in_processes

SYNCS = {
    "streaming": SyncConfig(6, "int4", fragments=2, overlap_steps=2, mixing=0.3),
    "whole": SyncConfig(4, "fp16", overlap_steps=3),
    "feedback": SyncConfig(4, "2bit", overlap_steps=1),
    "pruned": SyncConfig(4, "int8", overlap_steps=1, prune=0.5),
}


def trajectory(sync: SyncConfig) -> list[Tensor]:
    """Parameters and anchors of two workers after every step, with a lost contribution and evaluations in between."""
    world = InTurn(2, sync, Nesterov(lr=0.4), fail_at=[(1, 2)])
    seen = []
    for number in range(18):
        world.step()
        for model, optimizer in zip(world.models, world.optimizers, strict=True):
            if number % 5 == 3:
                with optimizer.outer_parameters():
                    seen += [parameter.detach().clone() for parameter in model.parameters()]
            seen += [parameter.detach().clone() for parameter in model.parameters()]
            seen += [fragment.anchor.clone() for fragment in optimizer.loop.state.fragments]
    assert {type(optimizer.loop.replica) for optimizer in world.optimizers} == {outer_loop.choose_replica(None, None)}  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("case", SYNCS)
def test_rounds_in_threads_give_the_bits_of_rounds_without(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(replica: type[OneRankReplica]) -> Callable[..., type[OneRankReplica]]:
        return lambda *_: replica

    monkeypatch.setattr(outer_loop, "choose_replica", kind(BackgroundReplica))
    beside = trajectory(SYNCS[case])
    monkeypatch.setattr(outer_loop, "choose_replica", kind(OneRankReplica))
    assert all(torch.equal(one, other) for one, other in zip(beside, trajectory(SYNCS[case]), strict=True))


def test_only_overlapped_rounds_on_a_cpu_have_threads() -> None:
    _, overlapped = build(alone(), SYNCS["whole"])
    _, classic = build(alone(), SyncConfig(4))
    assert type(overlapped.loop.replica) is BackgroundReplica
    assert type(classic.loop.replica) is OneRankReplica


def test_the_trainers_thread_neither_encodes_nor_steps_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    update = Nesterov.update

    def note(self: Nesterov, *arguments: object) -> None:
        threads.add(threading.current_thread().name)
        update(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Nesterov, "update", note)
    world = InTurn(1, SYNCS["streaming"])
    world.step(14)
    assert world.optimizers[0].loop.rounds > 2
    assert threads == {"diloco-waiting", "diloco-posting"}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a scheduling policy of Linux")
def test_threads_of_rounds_do_not_interrupt_the_trainers_thread_when_they_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: dict[str, int] = {}
    update = Nesterov.update

    def note(self: Nesterov, *arguments: object) -> None:
        policies[threading.current_thread().name] = os.sched_getscheduler(0)
        update(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Nesterov, "update", note)
    InTurn(1, SYNCS["streaming"]).step(14)
    assert policies == {"diloco-waiting": os.SCHED_BATCH, "diloco-posting": os.SCHED_BATCH}
    assert os.sched_getscheduler(0) != os.SCHED_BATCH


def thread_policies(engine: TorchDistributedEngine) -> tuple[int, list[int]]:
    """Of the trainer's thread, and of gloo's threads: a thread names itself, some time after it was started."""
    ends = time.monotonic() + 60.0
    policies: list[int] = []
    while os.SCHED_BATCH not in policies and time.monotonic() < ends:
        tasks = Path("/proc/self/task").iterdir()
        gloo = [int(task.name) for task in tasks if (task / "comm").read_text().startswith("gloo")]
        policies = [os.sched_getscheduler(thread) for thread in gloo]
        time.sleep(0.01)
    return os.sched_getscheduler(0), policies


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a scheduling policy of Linux")
def test_gloos_threads_of_rounds_do_not_interrupt_other_threads_when_they_wake() -> None:
    [(trainer, gloo)] = in_processes(1, thread_policies)
    assert trainer == os.SCHED_OTHER
    assert gloo.count(os.SCHED_BATCH) >= 1


def test_an_anchor_that_changed_after_the_mean_came_takes_the_step_anew() -> None:
    """What was prepared from the old anchor must not be merged."""
    world = InTurn(1, SYNCS["whole"], Nesterov(lr=0.4))
    optimizer = world.optimizers[0]
    world.step(5)
    loop = optimizer.loop
    loop.settle()  # the mean is there, and its step is prepared
    [fragment] = loop.state.fragments
    with loop.state.lock:
        fragment.anchor.add_(1.0)
        loop.replica.lanes[0].take_digests()
    changed = fragment.anchor.clone()
    loop.merge_pending()
    [fragment] = loop.state.fragments
    assert not torch.equal(fragment.anchor, changed)
    followed = torch.cat([tensor.detach().flatten() for tensor in fragment.tensors])
    assert torch.equal(followed, fragment.anchor)
    assert loop.replica.digests == [digest(fragment.anchor)]


def test_a_step_that_posts_and_merges_merges_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take the same core otherwise, and it is the merge that training waits for."""
    monkeypatch.setattr(background, "_MERGE_SECONDS", 60.0)
    world = InTurn(1, SyncConfig(6, "int4", fragments=2, overlap_steps=2, mixing=0.3))
    done = []
    for kind, name in ((Lane, "encode"), (Fragment, "follow_flat")):
        original = getattr(kind, name)

        def note(*arguments: object, name: str = name, original: Callable[..., object] = original) -> object:
            done.append(name)
            return original(*arguments)

        monkeypatch.setattr(kind, name, note)
    world.step(3)  # the first of three fragments is posted
    world.optimizers[0].loop.settle()
    assert done == ["encode"]
    world.step()  # posts the second, and merges the first
    world.optimizers[0].loop.settle()
    assert done == ["encode", "follow_flat", "encode"]


def test_a_post_that_fails_is_told_when_the_round_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    world = InTurn(1, SYNCS["whole"])

    def refuse(*_: object) -> None:
        raise OSError("no memory to send from")

    monkeypatch.setattr(world.optimizers[0].loop.replica.lanes[0].engine, "start_round", refuse)
    with pytest.raises(OSError, match="no memory to send from"):
        world.step(8)


def test_the_threads_of_a_worker_end_with_it() -> None:
    before = set(threading.enumerate())
    world = InTurn(2, SYNCS["whole"], Nesterov(lr=0.4))
    for _ in range(9):
        world.step()
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"diloco-posting", "diloco-waiting"}
    del world
    deadline = time.monotonic() + 60.0
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < deadline
        gc.collect()  # which does nothing while another thread collects
        time.sleep(0.01)
