"""Which parameter belongs to which fragment, and a fragment's flat fp32 memory.

A fragment is what one round averages: the whole model by default. In Streaming DiLoCo (arXiv 2501.18512, §2) a model's
blocks are dealt out to `fragments` fragments, strided (block i belongs to fragment i mod P, which the paper found
better than neighbours) or sequential (runs of neighbouring blocks); everything outside the blocks (embeddings, final
norm, head) is one more. By hand, a fragment is a list of patterns. `build_fragments` refuses a layout in which some
element is in no fragment or in two: every parameter element is averaged exactly once.

A fragment is cut into *parts*, a function of its size alone: a part is the unit that a codec encodes and that one
worker reduces. A *span* is a run of whole parts, small enough to stay in cache: the unit in which memory is processed.

How a fragment's memory is gone through is decided here: in place, or staged from pinned CPU memory (offload.py); on a
GPU its `kernels` take the steps of outer_step.py in one pass over memory. The bits are the same.
"""

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.core import offload as offloading
from diloco.core.config import SyncConfig
from diloco.core.digest import Digest
from diloco.core.gpu import has_triton
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.errors import ConfigError
from diloco.memory import move_to_huge_pages, zeros

if TYPE_CHECKING:
    from diloco.core.kernels import Kernels

PART_QUANTUM = 1024  # every part is a multiple of this, so that codecs can use blocks that divide it
_MAX_PART_ELEMENTS = 64 * PART_QUANTUM
_PARTS_WANTED = 64  # small fragments are still cut into enough parts to share the reducing evenly
_SPAN_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}  # with a quarter, a CPU spends half the time on calling torch


def span_elements(device: torch.device) -> int:
    """The elements to process at a time: on a CPU few enough for its cache, elsewhere many."""
    return _SPAN_ELEMENTS.get(device.type, 1 << 22)


@dataclass(frozen=True)
class PartLayout:
    """Cuts `numel` elements into equal parts; the last one is padded with zeros."""

    numel: int

    @cached_property
    def part_elements(self) -> int:
        wanted = -(-self.numel // _PARTS_WANTED)
        return min(_MAX_PART_ELEMENTS, max(PART_QUANTUM, -(-wanted // PART_QUANTUM) * PART_QUANTUM))

    @cached_property
    def num_parts(self) -> int:
        return -(-self.numel // self.part_elements)


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a fragment, beginning at a part's boundary."""

    start: int
    stop: int
    first_part: int
    num_parts: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


def parts_at_once(layout: PartLayout, elements: int) -> int:
    """Return how many parts a span of so many elements has: one at least, and no more than there are."""
    return min(layout.num_parts, max(1, elements // layout.part_elements))


def cut_spans(layout: PartLayout, parts: int) -> Iterator[Span]:
    """Cut a whole fragment into spans of so many parts, in order."""
    part = layout.part_elements
    for first in range(0, layout.num_parts, parts):
        count = min(parts, layout.num_parts - first)
        yield Span(first * part, min(layout.numel, (first + count) * part), first, count)


@dataclass(eq=False)
class Fragment:
    """Some tensors of the model, their anchor, and the outer optimizer's state for them."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    outer_opt: OuterOptimizer
    offload: bool = False
    """Anchor and state lie in pinned CPU memory; the tensors are on a GPU."""
    anchor: Tensor = field(init=False)
    state: dict[str, Tensor] = field(init=False)
    rounds: int = 0

    def __post_init__(self) -> None:
        device = self.tensors[0].device
        self.device = device
        ends = torch.tensor([tensor.numel() for tensor in self.tensors]).cumsum(0).tolist()
        self._starts: list[int] = [0, *ends[:-1]]
        self.layout = PartLayout(ends[-1])
        elements = offloading.SPAN_ELEMENTS if self.offload else span_elements(device)
        self._span_parts = parts_at_once(self.layout, elements)
        self._kept: list[Tensor] | None = None
        self.swapped = False
        """The anchor is in the tensors' memory, and the tensors' values are in the anchor's."""
        self._swappable = all(tensor.dtype == torch.float32 and tensor.requires_grad for tensor in self.tensors)
        self._memory = [(tensor.stride(), tensor.dtype, tensor.device) for tensor in self.tensors]
        most = self._span_parts * self.layout.part_elements
        # Kept on the CPU, where new memory is slow; a GPU's allocator has it at hand, and uses it meanwhile.
        self._scratch = torch.empty(most) if device.type == "cpu" else None
        self._kernels: Kernels | None = None
        self._staging: offloading.Staging | None = None
        self.anchor = self._outer_memory()
        self.state = {name: self._outer_memory() for name in self.outer_opt.state_names}
        if self.offload:
            self._staging = offloading.Staging(1 + len(self.state), most, device)
        self.take_anchor()

    def _outer_memory(self) -> Tensor:
        return offloading.pinned(self.numel) if self.offload else zeros(self.numel, self.device)

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def tensors_by_name(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.tensors, strict=True))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """View a flat buffer of this fragment as the tensors: by name, in their shapes and memory order."""
        first = flat.storage_offset()
        places = zip(self.names, self.tensors, self._starts, strict=True)
        return {name: flat.as_strided(t.shape, t.stride(), first + start) for name, t, start in places}

    def check_memory(self) -> None:
        """Refuse parameters whose memory order, type or device changed: the anchor has the order of the parameters."""
        for name, tensor, (stride, dtype, device) in zip(self.names, self.tensors, self._memory, strict=True):
            if (tensor.stride(), tensor.dtype, tensor.device) != (stride, dtype, device):
                raise ConfigError(
                    f"parameter '{name}' was changed after DiLoCo was built (strides {stride} to {tensor.stride()}, "
                    f"{dtype} on {device} to {tensor.dtype} on {tensor.device}): call model.to(...) before building it"
                )

    def spans(self) -> Iterator[Span]:
        """Cut the whole fragment into spans, in order."""
        return cut_spans(self.layout, self._span_parts)

    def read(self, span: Span) -> Tensor:
        """Copy θ_i of a span, in fp32, into scratch memory that the next read overwrites."""
        out = self.scratch(span)
        for tensor, inside, place in self._pieces(span):
            out[place].copy_(_flat_view(tensor)[inside])
        return out

    def minus_parameters(self, span: Span, anchor: Tensor, theta_i: Tensor | None = None) -> Tensor:
        """Compute anchor − θ_i of a span, in fp32, in scratch memory that the next read overwrites.

        `theta_i`: a flat fp32 copy of all parameters, in their place.
        """
        out = self.scratch(span)
        if theta_i is not None:
            return torch.sub(anchor, theta_i[span.slice], out=out)
        kernels = self.kernels
        if kernels is not None:
            kernels.outer_gradient(span.start, anchor, out=out)
            return out
        for tensor, inside, place in self._pieces(span):
            own = _flat_view(tensor)[inside]
            if own.dtype == torch.float64:
                own = out[place].copy_(own)
            torch.sub(anchor[place], own, out=out[place])
        return out

    def write(self, span: Span, values: Tensor) -> None:
        """θ_i of a span ← values (fp32; rounded to the parameter's own dtype)."""
        for tensor, inside, place in self._pieces(span):
            _flat_view(tensor)[inside].copy_(values[place])

    def follow(self, span: Span, anchor: Tensor, mixing: float) -> None:
        """θ_i of a span ← mixing · θ_i + (1 − mixing) · anchor, each element in fp32; with 1 nothing changes."""
        if mixing >= 1.0:
            return
        if not mixing:
            self.write(span, anchor)
            return
        for tensor, inside, place in self._pieces(span):
            own = _flat_view(tensor)[inside]
            if own.dtype == torch.float32:
                own.lerp_(anchor[place], 1.0 - mixing)
            else:
                own.copy_(own.float().lerp_(anchor[place], 1.0 - mixing))

    def _pieces(self, span: Span) -> Iterator[tuple[Tensor, slice, slice]]:
        """Find the tensors that a span crosses, with the range within the tensor and the range within the span."""
        for index in range(bisect_right(self._starts, span.start) - 1, len(self.tensors)):
            tensor = self.tensors[index]
            start = self._starts[index]
            if start >= span.stop:
                return
            first = max(span.start, start)
            last = min(span.stop, start + tensor.numel())
            yield tensor, slice(first - start, last - start), slice(first - span.start, last - span.start)

    def visit(
        self, *, write: bool = False, digest: Digest | None = None
    ) -> Iterator[tuple[Span, Tensor, Mapping[str, Tensor]]]:
        """Go through anchor and outer state span by span, on the device of θ_i; with `write` they may be changed in
        place.

        `digest` is given each span of the anchor when the caller asks for the next one: it is in a cache then.
        """
        for span, anchor, state in self._visit(write=write):
            yield span, anchor, state
            if digest is not None:
                digest.add(anchor)

    def _visit(self, *, write: bool) -> Iterator[tuple[Span, Tensor, Mapping[str, Tensor]]]:
        if self._staging is None:
            for span in self.spans():
                yield span, self.anchor[span.slice], {name: buffer[span.slice] for name, buffer in self.state.items()}
            return
        spans = list(self.spans())
        home = [self.anchor, *self.state.values()]
        for staged, span in zip(self._staging.visit(home, [s.slice for s in spans], write=write), spans, strict=False):
            yield span, staged[0], dict(zip(self.state, staged[1:], strict=True))

    @property
    def kernels(self) -> "Kernels | None":
        """The one-pass kernels for this fragment; only for fp32 parameters on a GPU."""
        if self.device.type != "cuda" or not has_triton():
            return None
        if any(tensor.dtype != torch.float32 for tensor in self.tensors):
            return None
        if self._kernels is None or self._kernels.moved:
            from diloco.core.kernels import Kernels

            self._kernels = Kernels(self.tensors, self.layout.part_elements)
        return self._kernels

    def scratch(self, span: Span) -> Tensor:
        """Return fp32 memory for a span, which the next `read` overwrites."""
        count = span.stop - span.start
        return torch.empty(count, device=self.device) if self._scratch is None else self._scratch[:count]

    @torch.no_grad()
    def take_anchor(self) -> None:
        """anchor ← θ_i."""
        for span, anchor, _ in self.visit(write=True):
            anchor.copy_(self.read(span))

    @torch.no_grad()
    def adopt_anchor(self, mixing: float = 0.0) -> None:
        """θ_i ← anchor (line 3 of Algorithm 1); `mixing` as in outer_step.py."""
        for span, anchor, _ in self.visit():
            self.follow(span, anchor, mixing)

    @torch.no_grad()
    def next_anchor(
        self, outer_opt: OuterOptimizer, mean_outer_gradient: Callable[[Span], Tensor], out: Tensor, digest: Digest
    ) -> None:
        """Compute line 14 of Algorithm 1 into `out` (flat, fp32): the bits that `outer_step` will make of the anchor.

        Nothing else changes.
        """
        copies = {name: torch.empty_like(self.scratch(next(self.spans()))) for name in self.state}
        for span, anchor, state in self.visit():
            new = out[span.slice].copy_(anchor)
            state_copy = {name: copies[name][: len(buffer)].copy_(buffer) for name, buffer in state.items()}
            outer_opt.update(new, mean_outer_gradient(span), state_copy, self.rounds + 1)
            digest.add(new)

    # One call for all tensors: it returns to Python, and so to the lock that all threads share, once

    @torch.no_grad()
    def copy_to(self, flat: Tensor) -> None:
        """flat ← θ_i, in fp32."""
        torch._foreach_copy_(list(self.views(flat).values()), list(self.tensors))

    @torch.no_grad()
    def follow_flat(self, flat: Tensor, mixing: float) -> None:
        """Do what `follow` does, for all spans and with the anchor `flat`."""
        own = list(self.tensors)
        anchor = list(self.views(flat).values())
        if not mixing:
            torch._foreach_copy_(own, anchor)
        elif all(tensor.dtype == torch.float32 for tensor in own):
            torch._foreach_lerp_(own, anchor, 1.0 - mixing)
        else:
            for span in self.spans():
                self.follow(span, flat[span.slice], mixing)

    @torch.no_grad()
    def add_anchor(self, factor: float) -> None:
        """θ_i ← θ_i + factor · anchor."""
        for span, anchor, _ in self.visit():
            self.write(span, self.read(span).add_(anchor, alpha=factor))

    @torch.no_grad()
    def exchange(self) -> None:
        """θ_i ← anchor at the first call, θ_i and the anchor as they were at the second: to evaluate the anchor.

        fp32 parameters are swapped with the anchor, which needs no memory. Other dtypes would round the anchor, and a
        forward pass in training mode would change it through a buffer: such tensors are copied instead.
        Call `check_memory` before.
        """
        if self._kept is not None or not self._swappable:
            self._keep_or_restore()
            return
        for span, anchor, _ in self.visit(write=True):
            theta_i = self.read(span)
            self.write(span, anchor)
            anchor.copy_(theta_i)
        self.swapped = not self.swapped

    @torch.no_grad()
    def anchor_values(self) -> Tensor:
        """Copy the anchor to the CPU, from wherever `exchange` has put it."""
        if not self.swapped:
            return self.anchor.to("cpu", copy=True)
        values = torch.empty(self.numel)
        for tensor, start in zip(self.tensors, self._starts, strict=True):
            values[start : start + tensor.numel()].copy_(_flat_view(tensor))
        return values

    def _keep_or_restore(self) -> None:
        if self._kept is None:
            self._kept = [tensor.detach().clone() for tensor in self.tensors]
            self.adopt_anchor()
            return
        torch._foreach_copy_(list(self.tensors), self._kept)
        self._kept = None


def _flat_view(tensor: Tensor) -> Tensor:
    """View a tensor as one dimension, in memory order (so that channels-last and transposed weights work)."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=lambda dim: tensor.stride()[dim], reverse=True)
        tensor = tensor.permute(order)
    return tensor.view(-1)


def assign(names: Sequence[str], sync: SyncConfig) -> list[list[str]]:
    """Assign every parameter to one fragment: the names of each.

    A name's block is the first number in it: `model.layers.3.mlp.up_proj.weight` is in block 3.
    """
    if sync.fragments_by_hand is not None:
        return _by_hand(names, sync.fragments_by_hand)
    if sync.fragments == 1:
        return [list(names)]
    numbers = {name: re.search(r"(?:^|\.)(\d+)\.", name) for name in names}
    blocks = sorted({int(number[1]) for number in numbers.values() if number})
    if len(blocks) < sync.fragments:
        raise ConfigError(
            f"fragments = {sync.fragments}, but the model has {len(blocks)} numbered blocks: "
            f"use at most {max(1, len(blocks))} fragments"
        )
    groups: list[list[str]] = [[] for _ in range(sync.fragments + 1)]
    for name, number in numbers.items():
        if number is None:
            index = sync.fragments
        elif sync.fragment_order == "strided":
            index = int(number[1]) % sync.fragments
        else:
            index = blocks.index(int(number[1])) * sync.fragments // len(blocks)
        groups[index].append(name)
    return [group for group in groups if group]


def _by_hand(names: Sequence[str], text: str) -> list[list[str]]:
    """Assign names by patterns. `text`: fragments separated by semicolons, each a list of patterns with commas."""
    fragments = [[pattern.strip() for pattern in part.split(",") if pattern.strip()] for part in text.split(";")]
    if not all(fragments):
        raise ConfigError(f"sync.fragments_by_hand = {text!r} has a fragment without a pattern: remove its semicolon")
    matches = {
        name: [i for i, patterns in enumerate(fragments) if any(fnmatchcase(name, pattern) for pattern in patterns)]
        for name in names
    }
    for name, places in matches.items():
        if len(places) != 1:
            where = "no fragment" if not places else f"the fragments {', '.join(str(i + 1) for i in places)}"
            raise ConfigError(
                f"sync.fragments_by_hand = {text!r} puts parameter '{name}' into {where}: every parameter must be in "
                "exactly one"
            )
    for patterns in fragments:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"sync.fragments_by_hand: the pattern {pattern!r} matches no parameter; a name is {names[0]!r}"
                )
    return [[name for name in names if matches[name] == [index]] for index in range(len(fragments))]


def build_fragments(
    parameters: Mapping[str, Tensor],
    groups: Sequence[Sequence[str]],
    outer_opt: OuterOptimizer,
    *,
    offload: bool = False,
) -> list[Fragment]:
    """Build a fragment of each group of names; every parameter must be in exactly one group."""
    named = [name for group in groups for name in group]
    missing = parameters.keys() - set(named)
    unknown = set(named) - parameters.keys()
    doubled = {name for name in named if named.count(name) > 1} if len(set(named)) < len(named) else set()
    if missing or unknown or doubled:
        raise ConfigError(
            "every parameter must be in exactly one fragment; "
            f"in none: {sorted(missing)}, in several: {sorted(doubled)}, not in the model: {sorted(unknown)}"
        )
    for name, tensor in parameters.items():
        _check_averageable(name, tensor)
        if offload and tensor.device.type != "cuda":
            raise ConfigError(
                f"sync.offload moves anchors from a GPU to the CPU, but parameter '{name}' is on {tensor.device}: "
                "leave it out"
            )
    _check_disjoint(parameters)
    move_to_huge_pages(parameters.values())  # each round reads and writes all of them
    return [
        Fragment(tuple(group), tuple(parameters[name] for name in group), outer_opt, offload)
        for group in groups
        if group
    ]


def _check_averageable(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ConfigError(f"parameter '{name}' has dtype {tensor.dtype}: only floating-point tensors can be averaged")
    if tensor.device.type == "meta":
        raise ConfigError(f"parameter '{name}' is on the meta device and has no values: materialise the model first")
    if tensor.numel() == 0:
        raise ConfigError(f"parameter '{name}' is empty: freeze it (requires_grad_(False)) or remove it")
    dense = torch.empty_like(tensor, memory_format=torch.preserve_format, device="meta")
    if dense.stride() != tensor.stride():
        raise ConfigError(
            f"parameter '{name}' with strides {tensor.stride()} shares or skips memory: make it contiguous first"
        )


def _check_disjoint(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters over the same memory (tied through `.data`): each name would be averaged and stepped."""
    by_address = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in parameters.items())
    for (_, end, name), (start, _, other) in pairwise(by_address):
        if start < end:
            first, second = sorted((name, other))
            raise ConfigError(
                f"parameters '{first}' and '{second}' share memory: tie weights by making them one parameter "
                "(model.head.weight = model.embedding.weight)"
            )


def layout_digest(fragments: Sequence[Mapping[str, Tensor]], *more: object) -> str:
    """Hash what all workers must share: names, shapes, memory order, and everything in `more`.

    `fragments`: the tensors of each, by name (`Fragment.tensors_by_name`).
    """
    description = [[(name, tuple(t.shape), t.stride()) for name, t in tensors.items()] for tensors in fragments]
    return hashlib.sha256(repr((description, more)).encode()).hexdigest()[:16]
