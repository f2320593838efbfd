"""The model of a worker of several ranks that to the others looks like a worker of one rank: what its ranks hold is
gathered as it is sent, and only then.

Every rank has its rows of each parameter, with their anchor and outer momentum. What travels between workers is in the
fragment's flat order, which all workers have in common, whatever their size (core/placement.py: who holds what of it):

    post     a window of spans, one for each rank: every rank gives each other one what it holds of that one's span;
             each encodes its span, and the first rank collects the bytes
    merge    all ranks have the encoded mean (engines/first_rank.py), and each decodes and steps what it holds
    digest   a sum over elements, to which each rank adds what it holds
    state    gathered on the first rank when a joiner asks, and spread from there when this worker takes one over

Spans, encoded bytes, norms, digests and states are those of a worker of one rank, bit for bit. Every method is
collective among the worker's ranks.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector, scratch
from diloco.core.config import SyncConfig
from diloco.core.digest import Digest, joined_digest
from diloco.core.fragments import Fragment, PartLayout, Span, cut_spans, layout_digest, parts_at_once, span_elements
from diloco.core.lanes import Piece
from diloco.core.outer_optimizers import SGD
from diloco.core.outer_step import outer_gradient
from diloco.core.placement import Placement
from diloco.engines.base import Connection
from diloco.engines.rounds import Contribution, GlobalState, Report, RoundKey
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import RoundFailed
from diloco.outer.method import GradientSource, LaneFragment, Method
from diloco.outer.replica import Lane, LaneRound, codec_of
from diloco.outer.rounds import PendingWorkerRound
from diloco.outer.sending import (
    ERROR_ELEMENTS,
    ERROR_EVERY,
    Group,
    Sending,
    cut_fragments,
    relative_error,
    take_step,
    total_norm,
)
from diloco.outer.shared_replica import SharedReplica
from diloco.outer.tensors import ModelTensors

_CHUNK_ELEMENTS = 1 << 22
"""The elements of a state that are gathered or spread at a time."""


class GatheredReplica(SharedReplica):
    """The replica of one rank."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Connection,
        groups: Sequence[Group],
        sync: SyncConfig,
        methods: Sequence[Method],
        common: tuple[object, ...],
    ) -> None:
        """`common`: what else must be the same on all workers. A method with an encoder of its own is refused
        (REFUSED_BY_RANKS_IN_A_SWARM)."""
        super().__init__(tensors, engine, groups, methods)
        pieces = {name: self._piece(name) for name in self.local}
        grouped = [[piece for name in group.names if (piece := pieces.pop(name)) is not None] for group in groups]
        views = [[(str(piece), self._view(piece)) for piece in group] for group in grouped]
        fragments = cut_fragments(groups, views, sync)
        placements = [self._placement(group.names) for group in groups]
        sending: list[Sending] = []
        for index, (group, fragment, placement) in enumerate(zip(groups, fragments, placements, strict=True)):
            gradient = None
            if fragment is not None:
                place = LaneFragment(index, 0, group, fragment, grouped[index], engine)
                gradient = next(filter(None, (method.gradient(place) for method in methods)), None)
            vector = self._vector(group, placement, sync)
            sending.append(GatheredSending(fragment, vector, placement, engine.ranks, gradient))
        all_tensors = tensors.all
        layout = layout_digest(
            [{name: all_tensors[name] for name in group.names} for group in groups],
            [(name, all_tensors[name].shape, all_tensors[name].dtype) for name in sorted(pieces)],
            *common,
        )
        whole = {
            f"{index}.{name}": WholeTensor(placement, torch.Size([placement.numel]), torch.float32)
            for index, (group, placement) in enumerate(zip(groups, placements, strict=True))
            for name in ("anchor", *group.outer.state_names)
        }
        for name in pieces:
            tensor = all_tensors[name]
            whole[f"start.{name}"] = WholeTensor(self._placement([name]), tensor.shape, tensor.dtype)
        start = {name: self._view(piece) for name, piece in pieces.items() if piece is not None}
        [lane_engine] = engine.lanes([(0,)])
        assert lane_engine is not None
        self.lane = GatheredLane(
            0,
            lane_engine,
            fragments,
            grouped,
            sending,
            start,
            layout,
            ranks=engine.ranks,
            placements=placements,
            whole=whole,
        )
        self.lanes = [self.lane]
        self.digests = self.lane.digests

    def _placement(self, names: Iterable[str]) -> Placement:
        return Placement([self.local[name].shape for name in names], self.engine.ranks.count)

    def _piece(self, name: str) -> Piece | None:
        """Return the rows of a tensor that this rank answers for, if any."""
        tensor = self.local[name]
        start, stop = tensor.bounds[self.engine.ranks.rank : self.engine.ranks.rank + 2]
        return Piece(name, tensor.shape, start, stop) if start < stop else None

    def _view(self, piece: Piece) -> Tensor:
        return self.local[piece.name].view(piece, self.engine.ranks.rank)

    def _vector(self, group: Group, placement: Placement, sync: SyncConfig) -> EncodedVector:
        """Make the vector of a whole fragment, on every rank: its memory is there while a round needs it."""
        device = self.local[group.names[0]].local.device
        return EncodedVector(codec_of(group, sync), PartLayout(placement.numel), device)

    def encode(self, index: int, turn: int, report: Report, *, dropped: bool = False) -> tuple[float, Report]:
        self.average_buffers(self.groups[index].names)
        norm = 0.0 if dropped else self.lane.encode(index, turn)
        self.encoded(index)
        return norm, self.agreed_report(report)

    def start_round(self, key: RoundKey, contributions: Sequence[Contribution], seconds: float) -> PendingWorkerRound:
        return LaneRound(self.lane.engine.start_round(key, contributions[0], seconds), contributions[0].norm)

    def merge(
        self, index: int, means: Sequence[EncodedVector], mixing: float, turn: int, *, plain: bool = False
    ) -> float:
        norm = self.lane.merge(index, means[0], mixing, turn, plain=plain)
        self.changed(index)
        return norm

    def are_finite(self, index: int, means: Sequence[EncodedVector]) -> bool:
        """Return whether a mean is finite. Each rank looks at a share of the parts; of a saved mean, at its own
        elements."""
        mean = means[0]
        ranks = self.engine.ranks
        whole = mean.layout == self.lane.sending[index].vector.layout
        return not ranks.any(not mean.is_finite(share=(ranks.rank, ranks.count) if whole else (0, 1)))

    def fetch_states(self) -> list[GlobalState] | None:
        """Return the others' state; every rank gets the tensors that it holds."""
        state = self.lane.engine.fetch_state()
        if state is None:
            return None
        if self.engine.ranks.tell(b"tensors" if state.tensors else b"") == b"":
            return [state]
        if state.layout_digest != self.lane.layout_digest:  # it is refused on all ranks for that
            return [replace(state, tensors={"": torch.empty(0)})]
        return [replace(state, tensors=self.lane.spread(state.tensors))]


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the state, as a worker of one rank has it."""

    placement: Placement
    shape: torch.Size
    dtype: torch.dtype


@dataclass(eq=False)
class GatheredLane(Lane):
    """What one rank holds of the model; what other workers get of it, and it gets of them, is whole."""

    ranks: WorkerRanks = field(kw_only=True)
    placements: Sequence[Placement] = field(kw_only=True)
    """Of the fragments."""
    whole: Mapping[str, WholeTensor] = field(kw_only=True)
    """All tensors of a state, by name."""

    def take_digests(self) -> None:
        totals = []
        for fragment, placement in zip(self.fragments, self.placements, strict=True):
            added = _PlacedDigest(torch.device("cpu") if fragment is None else fragment.anchor.device)
            added.place(placement, self.ranks.rank)
            if fragment is not None:
                added.add(fragment.anchor)
            totals.append(added.total)
        form = struct.Struct(f"<{len(totals)}Q")
        by_rank = [form.unpack(row) for row in self.ranks.gather(form.pack(*totals))]
        for index, placement in enumerate(self.placements):
            self.digests[index] = joined_digest((row[index] for row in by_rank), placement.numel)

    def state_bytes(self) -> int:
        return (1 << 20) + sum(
            tensor.placement.numel * max(4, tensor.dtype.itemsize) + 512 for tensor in self.whole.values()
        )

    def copies(self) -> dict[str, Tensor]:
        """Return on the first rank copies on the CPU of all that a joiner needs; on the others nothing."""
        held = self.start_tensors()
        for index, fragment in enumerate(self.fragments):
            if fragment is not None:
                held[f"{index}.anchor"] = fragment.anchor_values()
                held |= {f"{index}.{name}": flat for name, flat in fragment.state.items()}
        gathered = {name: self._gathered(tensor, held.get(name)) for name, tensor in self.whole.items()}
        return {name: tensor for name, tensor in gathered.items() if tensor is not None}

    def _gathered(self, tensor: WholeTensor, own: Tensor | None) -> Tensor | None:
        """Return the whole tensor on the first rank. `own`: what this rank holds of it, if anything."""
        placement = tensor.placement
        ranks = self.ranks
        own = torch.empty(0, dtype=tensor.dtype) if own is None else own.to("cpu")
        whole = torch.empty(placement.numel if ranks.rank == 0 else 0, dtype=tensor.dtype)
        for start, stop in _chunks(placement.numel):
            mine = slice(*placement.own_interval(ranks.rank, start, stop))
            for source, data in enumerate(_to_first(ranks, own[mine], placement, start, stop)):
                _put(data, placement, source, start, whole[start:stop], stop)
        return whole.view(tensor.shape) if ranks.rank == 0 else None

    def spread(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what this rank holds of `tensors`, which are whole on the first one. Raises RoundFailed on all ranks
        if one does not fit."""
        problem = self._misfit(tensors) if self.ranks.rank == 0 else ""
        problem = self.ranks.tell(problem.encode()).decode()
        if problem:
            raise RoundFailed(f"the state that arrived cannot be used: {problem}")
        return {name: self._spread(tensor, tensors.get(name)) for name, tensor in self.whole.items()}

    def _misfit(self, tensors: Mapping[str, Tensor]) -> str:
        for name, expected in self.whole.items():
            tensor = tensors.get(name)
            if tensor is None or (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                return f"tensor '{name}' is missing or not {tuple(expected.shape)} {expected.dtype}"
        return ""

    def _spread(self, tensor: WholeTensor, whole: Tensor | None) -> Tensor:
        placement = tensor.placement
        ranks = self.ranks
        own = torch.empty(placement.held(ranks.rank), dtype=tensor.dtype)
        for start, stop in _chunks(placement.numel):
            parts = [torch.empty(0, dtype=tensor.dtype)] * ranks.count
            if ranks.rank == 0:
                assert whole is not None
                parts = [_taken(whole.reshape(-1), placement, rank, start, stop) for rank in range(ranks.count)]
            first, after = placement.own_interval(ranks.rank, start, stop)
            lengths = [after - first] + [0] * (ranks.count - 1)
            own[first:after] = _exchanged(ranks, parts, lengths)[0]
        return own


class GatheredSending(Sending):
    """The outer gradients of one fragment. This rank holds `fragment` of it, or nothing."""

    def __init__(
        self,
        fragment: Fragment | None,
        vector: EncodedVector,
        placement: Placement,
        ranks: WorkerRanks,
        gradient: GradientSource | None,
    ) -> None:
        """`vector` is of the whole fragment; the one of the first rank travels. `gradient` is a method's, of what this
        rank holds; None: anchor − θ_i."""
        self.vector = vector
        self._fragment = fragment
        self._placement = placement
        self._ranks = ranks
        self._gradient = gradient
        self._device = vector.device
        parts = parts_at_once(vector.layout, span_elements(vector.device))
        self._spans = list(cut_spans(vector.layout, parts))

    @torch.no_grad()
    def encode(self, turn: int, theta_i: Tensor | None) -> tuple[float, float | None]:
        assert theta_i is None, "only a worker of one rank encodes beside training"
        placement = self._placement
        ranks = self._ranks
        own_gradient = _OwnOrder(self._own_spans(turn), self._device)
        told = []
        for first in range(0, len(self._spans), ranks.count):
            window = self._spans[first : first + ranks.count]
            held = [placement.own_interval(ranks.rank, span.start, span.stop) for span in window]
            values = own_gradient.take(held[-1][1] - held[0][0])
            parts = [values[start - held[0][0] : stop - held[0][0]] for start, stop in held]
            parts += [values[:0]] * (ranks.count - len(window))
            span = window[ranks.rank] if ranks.rank < len(window) else None
            if span is not None:
                told.append(self._encode_span(first + ranks.rank, span, parts))
            else:
                ranks.exchange(parts, [0] * ranks.count)
            self._collect_bytes(window)
        own_gradient.end()
        if ranks.rank:
            self.vector.give_back()  # only the first rank's travels; the mean comes into new memory
        return self._total(told)

    def _own_spans(self, turn: int) -> Iterator[tuple[Span, Tensor]]:
        if self._fragment is None:
            return iter(())
        self._fragment.check_memory()
        return outer_gradient(self._fragment) if self._gradient is None else self._gradient(turn, None)

    def _encode_span(self, number: int, span: Span, parts: Sequence[Tensor]) -> Tensor:
        """Encode this rank's span of a window; return (norm, squared error, squared norm of what that was measured
        on): of most spans the error is not measured, and is 0 here."""
        placement = self._placement
        vector = self.vector
        intervals = [placement.own_interval(rank, span.start, span.stop) for rank in range(self._ranks.count)]
        received = self._ranks.exchange(parts, [stop - start for start, stop in intervals])
        delta = scratch("gathered", (span.stop - span.start,), self._device)
        for rank, data in enumerate(received):
            _put(data, placement, rank, span.start, delta, span.stop)
        vector.encode(span.first_part, delta)
        norm = torch.linalg.vector_norm(delta)
        squares = torch.zeros(2, device=self._device)
        if number % ERROR_EVERY == 0 and not vector.codec.lossless:
            part = vector.layout.part_elements
            parts_measured = min(span.num_parts, max(1, ERROR_ELEMENTS // part))
            squares = vector.squared_error(span.first_part, parts_measured, delta[: parts_measured * part])
        return torch.cat([norm.reshape(1), squares])

    def _collect_bytes(self, window: Sequence[Span]) -> None:
        """Bring the bytes of the other ranks' spans to the first rank."""
        ranks = self._ranks
        vector = self.vector
        rows = [vector.data[span.first_part : span.first_part + span.num_parts].view(-1) for span in window]
        nothing = vector.data.view(-1)[:0]
        sends = 0 < ranks.rank < len(window)
        parts = [rows[ranks.rank] if sends else nothing, *(nothing for _ in range(ranks.count - 1))]
        lengths = [0] * ranks.count
        if ranks.rank == 0:
            lengths[1 : len(window)] = [len(data) for data in rows[1:]]
        for row, data in zip(rows[1:], ranks.exchange(parts, lengths)[1:], strict=False):
            if ranks.rank == 0:
                row.copy_(data)

    def _total(self, told: Sequence[Tensor]) -> tuple[float, float | None]:
        """Return norm and error over the spans of all ranks in their order, as a worker of one rank adds them up."""
        ranks = self._ranks
        most = -(-len(self._spans) // ranks.count)
        rows = torch.stack(list(told)).tolist() if told else []
        rows += [[0.0, 0.0, 0.0]] * (most - len(rows))
        by_rank = ranks.gather_numbers(*(number for row in rows for number in row))
        norms = []
        squares = []
        for number in range(len(self._spans)):
            place, rank = divmod(number, ranks.count)
            norm, error, whole = by_rank[rank][3 * place : 3 * place + 3]
            norms.append(torch.tensor(norm))
            if number % ERROR_EVERY == 0 and not self.vector.codec.lossless:
                squares.append(torch.tensor([error, whole]))
        return total_norm(norms), relative_error(squares)

    @torch.no_grad()
    def merge(self, mean: EncodedVector, mixing: float, turn: int, *, plain: bool) -> tuple[str, float | None]:
        fragment = self._fragment
        norm = 0.0
        total = 0
        if fragment is not None:
            outer_opt = SGD(lr=1.0) if plain else fragment.outer_opt.at(turn)
            digest = _PlacedDigest(fragment.device)
            digest.place(self._placement, self._ranks.rank)
            decoded = _OwnMean(self, mean)
            take_step(fragment, outer_opt, decoded, mixing, digest)
            norm = total_norm(decoded.norms)
            total = digest.total
        form = struct.Struct("<dQ")
        by_rank = [form.unpack(row) for row in self._ranks.gather(form.pack(norm, total))]
        digest_of_all = joined_digest((total for _, total in by_rank), self._placement.numel)
        return digest_of_all, math.hypot(*(norm for norm, _ in by_rank))

    def decode(self, mean: EncodedVector, span: Span) -> Tensor:
        """Return the values of a mean for a span of this rank's own order. A mean that was saved is in that order."""
        assert self._fragment is not None
        if mean.layout != self.vector.layout:
            return mean.decode(span.first_part, span.num_parts, self._device)
        layout = mean.layout
        part = layout.part_elements
        at_once = max(1, span_elements(self._device) // part)
        out = scratch("gathered", (span.stop - span.start,), self._device)
        written = 0
        decoded = range(0)  # the parts that `values` has
        values = out
        for start, stop in self._placement.runs(self._ranks.rank, span.start, span.stop):
            while start < stop:
                if start // part not in decoded:
                    wanted = min(-(-stop // part), start // part + at_once)
                    decoded = range(start // part, wanted)
                    values = mean.decode(decoded.start, len(decoded), self._device)
                count = min(stop, decoded.stop * part) - start
                out[written : written + count] = values[start - decoded.start * part :][:count]
                written += count
                start += count
        return out


class _OwnMean:
    """A mean as a function of the span of this rank's own order; also has its norms."""

    def __init__(self, sending: GatheredSending, mean: EncodedVector) -> None:
        self._sending = sending
        self._mean = mean
        self.norms: list[Tensor] = []

    def __call__(self, span: Span) -> Tensor:
        delta = self._sending.decode(self._mean, span)
        self.norms.append(torch.linalg.vector_norm(delta))
        return delta


class _OwnOrder:
    """The outer gradient of what this rank holds, in order, in pieces of any length."""

    def __init__(self, spans: Iterator[tuple[Span, Tensor]], device: torch.device) -> None:
        self._spans = spans
        self._device = device
        self._rest = torch.empty(0, device=device)

    def take(self, count: int) -> Tensor:
        """Return the next elements."""
        out = torch.empty(count, device=self._device)
        written = 0
        while written < count:
            if not len(self._rest):
                _, self._rest = next(self._spans)
            piece = self._rest[: count - written]
            out[written : written + len(piece)] = piece
            written += len(piece)
            self._rest = self._rest[len(piece) :]
        return out

    def end(self) -> None:
        """Let a method do what comes behind its last span, when all elements are taken."""
        assert next(self._spans, None) is None and not len(self._rest)


class _PlacedDigest(Digest):
    """The share of one rank in a digest: what it holds is added in its own order."""

    _placement: Placement
    _rank: int
    _position: int

    def place(self, placement: Placement, rank: int) -> None:
        self._placement = placement
        self._rank = rank
        self._position = 0

    def add(self, flat: Tensor) -> None:
        first = self._position
        self._position += len(flat)
        for start, stop in self._placement.runs(self._rank, first, self._position):
            self.add_at(start, flat[: stop - start])
            flat = flat[stop - start :]


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, min(numel, start + _CHUNK_ELEMENTS)) for start in range(0, numel, _CHUNK_ELEMENTS))


def _put(data: Tensor, placement: Placement, rank: int, start: int, into: Tensor, stop: int) -> None:
    """Write what a rank holds of [start, stop) of a fragment to its places; `into` is that interval."""
    for run_start, run_stop in placement.runs(rank, *placement.own_interval(rank, start, stop)):
        into[run_start - start : run_stop - start] = data[: run_stop - run_start]
        data = data[run_stop - run_start :]


def _taken(flat: Tensor, placement: Placement, rank: int, start: int, stop: int) -> Tensor:
    """Return what a rank holds of [start, stop) of a fragment, which is `flat`."""
    runs = [flat[a:b] for a, b in placement.runs(rank, *placement.own_interval(rank, start, stop))]
    return torch.cat(runs) if runs else flat[:0]


def _to_first(ranks: WorkerRanks, own: Tensor, placement: Placement, start: int, stop: int) -> list[Tensor]:
    """Return on the first rank what each rank holds of [start, stop) of a fragment; on the others nothing."""
    lengths = [0] * ranks.count
    if ranks.rank == 0:
        intervals = [placement.own_interval(rank, start, stop) for rank in range(ranks.count)]
        lengths = [after - first for first, after in intervals]
    received = _exchanged(ranks, [own, *(own[:0] for _ in range(ranks.count - 1))], lengths)
    return received if ranks.rank == 0 else []


def _exchanged(ranks: WorkerRanks, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Exchange tensors on the CPU of any dtype, as bytes (`WorkerRanks.exchange`)."""
    dtype = parts[0].dtype
    size = dtype.itemsize
    received = ranks.exchange([part.view(torch.uint8) for part in parts], [size * length for length in lengths])
    return [data.clone().view(dtype) if data.storage_offset() % size else data.view(dtype) for data in received]
