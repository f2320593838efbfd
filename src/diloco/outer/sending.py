"""What each fragment of a model is (its `Group`), and how it is sent (its `Sending`).

Sending is an outer gradient into bytes, and the outer step with a mean that came back as bytes. Both go through a
fragment span by span, as in core/outer_step.py: one span is subtracted, encoded and forgotten before the next, and a
mean is decoded where it is used. On a GPU either is one launch for the whole fragment, if the codec has kernels for it
(codecs/gradient_kernels.py), and else one for each span (core/kernels.py). The bits are the same.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.core.config import Merge, SyncConfig
from diloco.core.digest import Digest
from diloco.core.fragments import Fragment, Span, assign, build_fragments
from diloco.core.outer_optimizers import SGD, OuterOptimizer
from diloco.core.outer_step import outer_gradient, outer_step
from diloco.core.schedule import RoundLengths, Schedule
from diloco.outer.tensors import ModelTensors

if TYPE_CHECKING:
    from diloco.core.kernels import Kernels

NO_DIGEST = "0" * 16  # of what has no anchor in a lane
ERROR_EVERY = 16  # what a codec loses is measured on every so many-th span
ERROR_ELEMENTS = 1 << 22  # and on at most so many elements of it


class Sending(ABC):
    """Encodes one group of one lane for its rounds, and merges the mean."""

    vector: EncodedVector
    """The bytes that travel."""

    def is_header_only(self, turn: int, done: bool) -> bool:  # noqa: ARG002
        """Whether only a header travels in this turn; `done`: this worker has taken all its steps."""
        return False

    @abstractmethod
    def encode(self, turn: int, theta_i: Tensor | None) -> tuple[float, float | None]:
        """Fill the vector; returns the norm of what is sent, and the codec's relative error ‖sent − Δ‖ / ‖Δ‖ if it has
        one.

        `theta_i`: a flat copy of the fragment's parameters, in place of the parameters.
        """

    @abstractmethod
    def merge(self, mean: EncodedVector, mixing: float, turn: int, *, plain: bool) -> tuple[str, float | None]:
        """Take a round's mean; returns the digest of the new anchor, and the norm of the mean; None: it is this
        worker's own.

        `mixing`: the share of its own parameters that the worker keeps. `plain`: as RoundResult.plain.
        """

    def decode(self, mean: EncodedVector, span: Span) -> Tensor:
        """Return the values of a mean for a span of what this rank holds of the fragment, in scratch memory."""
        return mean.decode(span.first_part, span.num_parts)


@dataclass(frozen=True)
class Group:
    """The names of one fragment's tensors, and the outer optimizer that steps them."""

    names: tuple[str, ...]
    outer: OuterOptimizer
    max_norm_ratio: float | None
    """The bound on norms, as in SyncConfig; None for buffers: statistics of different data may differ by any factor."""
    merge: Merge = "mean"
    """The way of merging, as in SyncConfig; all but parameters is averaged plainly."""
    buffers: bool = False
    """Counted buffers, which are few: they travel whole, with 16 bits at least."""
    sending: Sending | None = None
    """The sender of something else than tensors of the model (methods/second_moments.py); there is no fragment then."""

    @property
    def auxiliary(self) -> bool:
        """Whether the group is averaged beside the parameters: its rounds are no outer steps, and no rounds to the
        user."""
        return self.buffers or self.sending is not None


def make_groups(
    tensors: ModelTensors,
    sync: SyncConfig,
    outer: OuterOptimizer,
    growth: RoundLengths | None,
    more: Sequence[Group],
) -> tuple[list[Group], Schedule]:
    """Say what each fragment holds, and when it is posted. `more`: groups that travel with the last fragment."""
    groups = [
        Group(tuple(names), outer, sync.max_norm_ratio, sync.merge) for names in assign(list(tensors.averaged), sync)
    ]
    offsets = Schedule.spread(sync.num_inner_steps, len(groups)).offsets
    if tensors.averaged_buffers:  # a plain mean is the outer optimizer SGD(1.0); they travel with the last fragment
        groups.append(Group(tuple(tensors.averaged_buffers), SGD(lr=1.0), None, buffers=True))
    groups += more
    offsets += offsets[-1:] * (len(groups) - len(offsets))
    return groups, Schedule(sync.num_inner_steps, offsets, sync.overlap_steps, sync.warm_start, growth)


def cut_fragments(
    groups: Sequence[Group], members: Sequence[Sequence[tuple[str, Tensor]]], sync: SyncConfig
) -> list[Fragment | None]:
    """Build a fragment for each group, of its (label, tensor) pairs; None where there are none."""
    fragments: list[Fragment | None] = [None] * len(groups)
    for outer in {group.outer: None for group in groups}:
        mine = [i for i, group in enumerate(groups) if group.outer == outer and members[i]]
        labels = [[label for label, _ in members[i]] for i in mine]
        built = build_fragments(dict(pair for i in mine for pair in members[i]), labels, outer, offload=sync.offload)
        for i, fragment in zip(mine, built, strict=True):
            fragments[i] = fragment
    return fragments


class NothingToSend(Sending):
    """A lane that holds nothing of a group takes part in its rounds with a header alone."""

    def __init__(self, vector: EncodedVector) -> None:
        self.vector = vector

    def encode(self, turn: int, theta_i: Tensor | None) -> tuple[float, float | None]:
        del turn, theta_i
        return 0.0, None

    def merge(self, mean: EncodedVector, mixing: float, turn: int, *, plain: bool) -> tuple[str, float | None]:
        del mean, mixing, turn, plain
        return NO_DIGEST, 0.0


class FragmentSending(Sending):
    """The outer gradients of a fragment of the model."""

    def __init__(
        self,
        fragment: Fragment,
        vector: EncodedVector,
        gradient: Callable[[int, Tensor | None], Iterator[tuple[Span, Tensor]]] | None = None,
        encoder: Callable[[EncodedVector, Span, Tensor], Tensor] | None = None,
    ) -> None:
        """`gradient` and `encoder` are a method's (outer/method.py); None: anchor − θ_i, and the codec alone."""
        self.vector = vector
        self._fragment = fragment
        self._gradient = gradient
        self._encoder = encoder

    def encode(self, turn: int, theta_i: Tensor | None) -> tuple[float, float | None]:
        """Encode the outer gradient span by span. The error is measured on some of them; None: the codec is
        lossless."""
        fragment = self._fragment
        vector = self.vector
        fragment.check_memory()
        if self._gradient is None and self._encoder is None:
            kernels = kernels_in_one_pass(fragment, vector)
            if kernels is not None:
                from diloco.codecs.gradient_kernels import encode_gradient

                squares = encode_gradient(kernels, fragment, vector)
                return total_norm([squares[1].sqrt()]), relative_error([squares])
        norms = []
        squared_errors = []
        spans = outer_gradient(fragment, theta_i) if self._gradient is None else self._gradient(turn, theta_i)
        for number, (span, delta) in enumerate(spans):
            if self._encoder is not None:
                norms.append(self._encoder(vector, span, delta))
            else:
                norms.append(torch.linalg.vector_norm(delta))
                if vector.num_bytes:
                    vector.encode(span.first_part, delta)
            if number % ERROR_EVERY == 0 and vector.num_bytes and not vector.codec.lossless:
                part = fragment.layout.part_elements
                parts = min(span.num_parts, max(1, ERROR_ELEMENTS // part))
                squared_errors.append(vector.squared_error(span.first_part, parts, delta[: parts * part]))
            del delta  # before the next one is made
        return total_norm(norms), relative_error(squared_errors)

    @torch.no_grad()
    def merge(self, mean: EncodedVector, mixing: float, turn: int, *, plain: bool) -> tuple[str, float | None]:
        """Take the outer step. A mean without bytes is that of a worker alone, whose outer gradient is its own.

        `plain`: θ ← θ − Δ, and the outer optimizer's state stays as it is. At the end of a run, where Δ is what some
        workers have left and others have nothing, momentum would add a whole step without work.
        """
        fragment = self._fragment
        outer_opt = SGD(lr=1.0) if plain else fragment.outer_opt.at(turn)
        taken = Digest(fragment.device)
        if not mean.num_bytes:
            take_step(fragment, outer_opt, None, mixing, taken)
            return taken.hexdigest(), None
        kernels = kernels_in_one_pass(fragment, mean)
        if kernels is not None and kernels.know(outer_opt):
            from diloco.codecs.gradient_kernels import step_with_mean

            fragment.rounds += 1
            norm = step_with_mean(kernels, fragment, mean, outer_opt, mixing, taken).sqrt()
            return taken.hexdigest(), total_norm([norm])
        decoded = _DecodedMean(mean, fragment.device)
        take_step(fragment, outer_opt, decoded, mixing, taken)
        return taken.hexdigest(), decoded.norm()

    def next_anchor(self, mean: EncodedVector, turn: int, out: Tensor) -> tuple[str, float]:
        """Compute into `out` what `merge` will make of the anchor; returns its digest, and the norm of the mean."""
        taken = Digest(self._fragment.device)
        decoded = _DecodedMean(mean, self._fragment.device)
        self._fragment.next_anchor(self._fragment.outer_opt.at(turn), decoded, out, taken)
        return taken.hexdigest(), decoded.norm()


class _DecodedMean:
    """An encoded mean as a function of the span, which also gathers its norm."""

    def __init__(self, encoded: EncodedVector, device: torch.device) -> None:
        self._encoded = encoded
        self._device = device
        self._norms: list[Tensor] = []

    def __call__(self, span: Span) -> Tensor:
        delta = self._encoded.decode(span.first_part, span.num_parts, self._device)
        self._norms.append(torch.linalg.vector_norm(delta))
        return delta

    def norm(self) -> float:
        return total_norm(self._norms)


@torch.no_grad()
def take_step(
    fragment: Fragment,
    outer_opt: OuterOptimizer,
    mean_outer_gradient: Callable[[Span], Tensor] | None,
    mixing: float = 0.0,
    digest: Digest | None = None,
) -> None:
    """Take `outer_step`; in kernels, if the fragment has them and they know the outer optimizer."""
    kernels = fragment.kernels
    if kernels is None or not kernels.know(outer_opt):
        outer_step(fragment, outer_opt, mean_outer_gradient, mixing, digest)
        return
    fragment.rounds += 1
    for span, anchor, state in fragment.visit(write=True, digest=digest):
        delta = None if mean_outer_gradient is None else mean_outer_gradient(span)
        kernels.outer_step(span.start, outer_opt, anchor, state, delta, mixing)
        del delta  # before the next one is made


def kernels_in_one_pass(fragment: Fragment, vector: EncodedVector) -> "Kernels | None":
    """Return the kernels that take a round of this fragment and vector in one pass; None on a CPU
    (gradient_kernels.py)."""
    if fragment.device.type != "cuda" or fragment.kernels is None or not vector.num_bytes:
        return None
    from diloco.codecs.gradient_kernels import kernels_for

    return kernels_for(fragment, vector)


def relative_error(squares: Sequence[Tensor]) -> float | None:
    """Return the relative error of some values, from (squared error, squared norm) of each."""
    error, whole = torch.stack(list(squares)).double().sum(0).tolist() if squares else (0.0, 0.0)
    return math.sqrt(error / whole) if whole > 0 and math.isfinite(error / whole) else None


def total_norm(norms: Sequence[Tensor]) -> float:
    """Return the norm of the whole. All at once: on a GPU every such question waits for what was begun before it."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms)).double())) if norms else 0.0
