"""Short runs of every method on a problem whose bits are the same on all processors of one kind.

The loss is elementwise: no matrix product and no transcendental function, whose last bits differ between makers of
processors. What remains (fused multiply-add or not, the last bit of a square root) is in the name of `processor()`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diloco.core.config import SyncConfig
from diloco.engines.asynchronous import replay
from diloco.engines.base import Engine
from diloco.engines.local import LocalSwarm
from diloco.methods.dynamic_steps import DynamicSteps
from diloco.optimizer import DiLoCo
from diloco.outer.rounds import RoundEvent
from support.elastic import ElasticSwarm
from support.methods import method_of
from support.problem import Net, build, flat
from support.threads import in_threads


def processor() -> str:
    """Name torch's version, its instruction set and the bits of its square roots, which MKL rounds by processor.

    With all three equal, elementwise results are equal.
    """
    roots = torch.arange(1, 4097, dtype=torch.float32).div(64).sqrt()
    version = torch.__version__.split("+")[0]
    bits = hashlib.sha256(roots.numpy()).hexdigest()[:8]
    return f"torch {version}, {torch.backends.cpu.get_cpu_capability()}, roots {bits}"


def pull(model: nn.Module, worker: int, step: int) -> Tensor:
    """The loss: every parameter is pulled to a target of this worker and step, each neuron with another strength."""
    generator = torch.Generator().manual_seed(100_003 * worker + step)
    losses = []
    for parameter in model.parameters():
        target = torch.randint(-64, 65, parameter.shape, generator=generator) / 64
        strength = torch.arange(1, len(parameter) + 1).view(-1, *[1] * (parameter.dim() - 1)) / len(parameter)
        losses.append(((parameter - target).square() * strength).sum())
    return torch.stack(losses).sum()


@dataclass
class Recorded:
    """What one worker saw: after each step its parameters and its anchors, a state saved on the way, its rounds."""

    digests: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    saved: str = ""
    rounds: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "digests": " ".join(self.digests), "norms": " ".join(map(str, self.norms))}


class Recorder:
    """A worker on this problem that writes down what it sees."""

    def __init__(self, engine: Engine, sync: SyncConfig, save_at: int, **more: Any) -> None:
        self.worker = engine.worker
        self.save_at = save_at
        self.model: Net
        self.optimizer: DiLoCo
        self.model, self.optimizer = build(engine, sync, **more)
        self.recorded = Recorded()
        self.optimizer.loop.on_round = lambda event: self.recorded.rounds.append(described(event))

    @property
    def steps_taken(self) -> int:
        return self.optimizer.loop.state.steps_taken

    def inner_step(self) -> None:
        self.optimizer.zero_grad()
        pull(self.model, self.worker, self.steps_taken).backward()
        self.optimizer.inner_step()

    def post(self) -> None:
        self.optimizer.post()

    def merge(self) -> None:
        self.optimizer.merge()
        self.note()
        if self.steps_taken == self.save_at:
            self.recorded.saved = digest_of_state(self.optimizer)

    def step(self) -> None:
        self.inner_step()
        self.post()
        self.merge()

    def finish(self, *, early: bool = False) -> Recorded:
        self.optimizer.finish(early=early)
        self.note()
        self.recorded.rounds.append(f"{self.optimizer.bytes_sent} bytes sent")
        return self.recorded

    def note(self) -> None:
        parameters = flat(self.model)
        bits = hashlib.sha256(parameters.numpy().tobytes() + self.optimizer.anchor_digest().encode())
        self.recorded.digests.append(bits.hexdigest()[:8])
        self.recorded.norms.append(round(float(torch.linalg.vector_norm(parameters.double())), 6))


def described(event: RoundEvent) -> str:
    """A round in one line, without what depends on the machine."""
    name = f"{event.key.sequence} of {event.key.fragment} at {event.inner_step}{' dropped' if event.dropped else ''}"
    if event.result is None:
        return f"{name}: {event.failure}"
    result = event.result
    return (
        f"{name}: {list(result.contributors)} weight {result.total_weight:g} sent {result.bytes_sent} received "
        f"{result.bytes_received} refused {sorted(result.refused)} roster {list(result.roster)}"
    )


def digest_of_state(optimizer: DiLoCo) -> str:
    """The names, shapes and bits of what a checkpoint has of the outer loop, and the names of its numbers."""
    saved = optimizer.state_dict()["diloco"]
    bits = hashlib.sha256()
    for name, tensor in sorted(saved["tensors"].items()):
        values = tensor.detach().contiguous()
        bits.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        bits.update(values.view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    bits.update(" ".join(sorted(saved["numbers"])).encode())
    return bits.hexdigest()[:16]


def in_rounds(
    sync: SyncConfig,
    workers: int = 2,
    steps: int = 11,
    *,
    counts: Sequence[int] = (),
    stop_after: int | None = None,
    seconds: Sequence[float] = (),
    fail_at: Sequence[tuple[int, int]] = (),
    weights: Sequence[float] = (),
    **more: Any,
) -> list[Recorded]:
    """Workers in threads that train until position `steps`, or counts[i], and finish.

    `stop_after`: worker 0 ends early after so many steps, and the others when they hear of it. `seconds`: that an inner
    step takes each worker, with dynamic steps. `more`: for DiLoCo.
    """

    def work(engine: Engine) -> Recorded:
        weight = weights[engine.worker] if weights else 1.0
        mine = Recorder(engine, sync, 8, weight=weight, **more)
        if seconds:
            give_clock(mine, seconds[engine.worker])
        early = False
        while mine.optimizer.position < (counts[engine.worker] if counts else steps):
            early = engine.worker == 0 and mine.steps_taken == stop_after
            if early or mine.optimizer.loop.stopping:
                break
            mine.step()
        return mine.finish(early=early)

    return in_threads(workers, work, fail_at=fail_at)


def give_clock(recorder: Recorder, seconds: float) -> None:
    """A clock that counts `seconds` for each inner step of this worker."""
    pace = method_of(recorder.optimizer.loop, DynamicSteps)
    assert pace is not None
    pace.clock = lambda: recorder.steps_taken * seconds
    pace.begin_anew()


def in_order_of_arrival(sync: SyncConfig, seconds: Sequence[float], until: float) -> list[Recorded]:
    """Asynchronous workers on a virtual clock, without the end: the order of the last arrivals is the scheduler's."""
    workers = [Recorder(engine, sync, 8) for engine in LocalSwarm(len(seconds)).engines()]
    replay(lambda worker: workers[worker].step(), seconds, until)
    return [worker.recorded for worker in workers]


def with_joiners(sync: SyncConfig, **more: Any) -> list[Recorded]:
    """Elastic workers in one thread: a third joins, the first leaves, the second misses a round; no end."""
    swarm = ElasticSwarm(range(2), drop=[(1, 3)])
    workers = [Recorder(swarm.engine(number), sync, 8, **more) for number in range(2)]
    active = list(workers)

    def step(times: int) -> None:
        for _ in range(times):
            each(lambda worker: worker.inner_step())
            each(post)
            each(lambda worker: worker.merge())

    def each(do: Callable[[Recorder], None]) -> None:
        for worker in active:
            do(worker)

    def post(worker: Recorder) -> None:
        worker.post()
        worker.optimizer.loop.replica.finish_posts()  # in one thread, the others may look for it at once

    step(5)
    workers.append(Recorder(swarm.engine(2), sync, 8, **more))
    active.append(workers[2])
    step(6)
    active.remove(workers[0])
    swarm.leave(0)
    step(5)
    return [worker.recorded for worker in workers]
