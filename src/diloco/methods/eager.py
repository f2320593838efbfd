"""Eager updates: a round travels during all H inner steps after it (arXiv 2502.12996, 1-outer-step overlap).

Published: at round t worker i takes an outer step with Δ̃_i = Δ^(t-1) + (Δ_i^(t) − Δ_i^(t-1)) / k, the mean of the
round before with its own part replaced by the fresh one. SGD and Nesterov are linear in Δ, so this is the same as

    A ← OuterOpt(A, Δ^(t-1))             the anchor, a round late, the same on all workers
    θ_i ← A + OuterOpt(0, Δ_i^(t) / k)   and on top of it the worker's own share of the round that is on its way

where the second OuterOpt has a momentum of its own, which has seen this worker's shares only. Written like this the
anchor keeps equal bits on all workers, and joiners, digests and evaluation need to know nothing of it.

Δ_i^(t) is measured from where the worker began the H steps, its *start*, which is no longer the anchor.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from diloco.core.fragments import Fragment, Span
from diloco.core.outer_optimizers import SGD, Nesterov
from diloco.errors import ConfigError
from diloco.outer.method import GradientSource, LaneFragment, Means, Method, Options, TrainingWorker


class EagerUpdates(Method):
    """`sync.outer_overlap`: the starts of this worker's fragments."""

    travels_a_turn = True

    @classmethod
    def chosen(cls, options: Options) -> "EagerUpdates | None":
        overlap = options.sync.outer_overlap
        return None if overlap == "none" else cls(delayed=overlap == "delayed")

    def __init__(self, *, delayed: bool) -> None:
        """`delayed`: the naive form, without the worker's own share."""
        self._delayed = delayed
        self._fragments: dict[int, list[EagerFragment]] = {}  # by number, in the order of the lanes that have it
        self._worker: TrainingWorker | None = None

    def gradient(self, place: LaneFragment) -> GradientSource:
        fragment = EagerFragment(place.fragment, delayed=self._delayed)
        self._fragments.setdefault(place.index, []).append(fragment)

        def eager_gradient(turn: int, theta_i: Tensor | None) -> Iterator[tuple[Span, Tensor]]:
            del theta_i
            return fragment.outer_gradient(place.engine.workers, turn)

        return eager_gradient

    def begin(self, worker: TrainingWorker) -> None:
        self._worker = worker

    def take_back(self, index: int, turn: int) -> bool:
        assert self._worker is not None
        workers = self._worker.engine.workers
        taken_back = [fragment.take_back(workers, turn) for fragment in self._fragments.get(index, [])]
        return all(taken_back)

    def at_anchor(self, index: int) -> None:
        for fragment in self._fragments.get(index, []):
            fragment.reset()

    @contextmanager
    def moving_anchors(self, indices: Iterable[int]) -> Iterator[None]:
        """Let the worker's starts move along with the anchors."""
        moving = [fragment for index in indices for fragment in self._fragments.get(index, [])]
        for fragment in moving:
            fragment.add_anchor(-1.0)
        yield
        for fragment in moving:
            fragment.add_anchor(1.0)

    def saved_tensors(self, index: int, means: Means) -> dict[str, list[Tensor]]:
        del means
        fragments = self._fragments.get(index, [])
        if not fragments:
            return {}
        saved = {"outer.start": [fragment.start for fragment in fragments]}
        for kind in fragments[0].state:
            saved[f"outer.own_{kind}"] = [fragment.state[kind] for fragment in fragments]
        return saved


class EagerFragment:
    """The memory of one fragment besides its anchor: the worker's start, and the momentum of its own shares."""

    def __init__(self, fragment: Fragment, *, delayed: bool) -> None:
        """`delayed`: the naive form, without the worker's own share: θ_i ← A."""
        outer = fragment.outer_opt
        if not isinstance(outer, (SGD, Nesterov)):
            raise ConfigError(
                f"sync.outer_overlap needs an outer optimizer that is linear in the outer gradient, and '{outer.name}' "
                "is not (or hides a worker's own part): use nesterov or sgd"
            )
        self._fragment = fragment
        self._delayed = delayed
        self._workers: int | None = None  # in the round in flight, as far as was known
        self.start = fragment.anchor.clone()
        self.state = {} if delayed else {name: torch.zeros_like(fragment.anchor) for name in outer.state_names}

    @torch.no_grad()
    def outer_gradient(self, workers: int, turn: int = 0) -> Iterator[tuple[Span, Tensor]]:
        """Compute Δ_i = start − θ_i, span by span; behind each span the worker moves to its next start. `workers` is k.

        `turn`: of the schedule, for an outer optimizer with a course.
        """
        fragment = self._fragment
        self._workers = workers
        outer = fragment.outer_opt.at(turn)
        fragment.check_memory()
        for span, anchor, _ in fragment.visit():
            start = self.start[span.slice]
            delta = start - fragment.read(span)
            yield span, delta
            start.copy_(anchor)
            if not self._delayed:
                state = {name: buffer[span.slice] for name, buffer in self.state.items()}
                outer.update(start, delta.div_(workers), state, round_number=1)
            fragment.write(span, start)

    @torch.no_grad()
    def take_back(self, workers: int, turn: int = 0) -> bool:
        """Let the next outer gradient carry the work of the round in flight, which has failed; False if it cannot.

        The start moves back by Δ_i of that round, which follows from the share that was taken of it.
        """
        if self._delayed:
            return False
        outer = self._fragment.outer_opt.at(turn)
        assert isinstance(outer, (SGD, Nesterov))
        momentum = outer.momentum if isinstance(outer, Nesterov) else 0.0
        for span, anchor, _ in self._fragment.visit():
            start = self.start[span.slice]
            taken = (anchor - start).div_(outer.lr)  # d + μ b, with d = Δ_i / k and b = μ b_before + d
            if momentum:
                b = self.state["momentum"][span.slice]
                taken.sub_(b, alpha=momentum)
                b.sub_(taken).div_(momentum)
            start.add_(taken, alpha=float(self._workers or workers))
        return True

    @torch.no_grad()
    def add_anchor(self, factor: float) -> None:
        """start ← start + factor · anchor."""
        self.start.add_(self._fragment.anchor, alpha=factor)

    def reset(self) -> None:
        """Begin anew from the anchor: none of the worker's work is on its way."""
        self.start.copy_(self._fragment.anchor)
        for buffer in self.state.values():
            buffer.zero_()
