"""The memory of one process of a run: a table of what it holds, where and when, most of it in copies of the parameters.

Whatever is made of parameters is exact: it follows from the model's shapes and the code's own layouts. Activations are
estimated: for our transformer from its shape, for other models by a pass over tensors that have shapes and no memory.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout, assign
from diloco.core.lanes import Shape, shard_bounds
from diloco.methods.second_moments import moments_codec
from diloco.models.base import LanguageModel
from diloco.models.native.config import ModelConfig
from diloco.models.native.head import ROWS_AT_ONCE
from diloco.models.native.model import NativeModel
from diloco.models.registry import model_outline
from diloco.training.compute import SHORT_TYPES, WORTH_COMPILING
from diloco.training.config.run import RunConfig
from diloco.training.inner import is_hidden_matrix
from diloco.training.sizes.room import anchor_copies, kept_copies

ACTIVATIONS = "activations, estimated"
ANCHOR_OF_WORKER_0 = "anchor that all workers move, of worker 0 alone"
_FP32 = 4
_P2PD_BYTES = 70_000_000  # measured
_META = torch.device("meta")
_LOGITS = 3  # log-softmax, its gradient, and that of the logits


@dataclass(frozen=True)
class Placement:
    """The devices of a run's processes, and the number of workers that average."""

    workers: int
    """The workers of the whole run."""
    ranks: int = 1
    """The ranks of each worker."""
    cuda: bool = False
    precision: str = "fp32"

    @property
    def alone(self) -> bool:
        return self.workers == 1


def encoded_vectors(config: RunConfig, shapes: Mapping[str, Shape], ranks: int = 1) -> list[EncodedVector]:
    """Return what travels of each fragment, of the rank that holds most, without its memory."""
    groups = assign(list(shapes), config.sync) if config.mode == "diloco" else [list(shapes)]
    layouts = [PartLayout(sum(shard_bounds(shapes[name], ranks)[1] for name in group)) for group in groups]
    return [EncodedVector(codec(config.sync.codec), layout, _META) for layout in layouts]


@dataclass(frozen=True)
class MemoryRow:
    """A row of the table: something that a process holds."""

    name: str
    bytes: int
    where: Literal["host", "model", "anchors"] = "host"
    """In main memory; with the model; or with the model unless sync.offload keeps it in main memory."""
    when: Literal["always", "steps", "rounds"] = "always"
    """Rows of steps and of rounds are not there together, unless rounds overlap with training."""


def process_memory(
    config: RunConfig, outline: LanguageModel, place: Placement, base: int, vocab_size: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of main memory and of GPU memory, by what they hold, when a process holds most.

    `base`: the interpreter and its libraries.
    """
    shapes = {name: tuple(p.shape) for name, p in outline.named_parameters() if p.requires_grad}
    whole = sum(p.numel() for p in outline.parameters())
    trained = sum(torch.Size(shape).numel() for shape in shapes.values())
    averaged = sum(shard_bounds(shape, place.ranks)[1] for shape in shapes.values())
    sharded = place.ranks > 1 and config.compute.sharding == "fsdp"
    held = averaged if sharded else whole
    inner = round(held / whole * _FP32 * inner_elements(config, shapes))
    gradients = _FP32 * (averaged if sharded else trained)
    rows = [
        MemoryRow("parameters", _FP32 * held, "model"),
        MemoryRow("inner optimizer", inner, "model"),
        MemoryRow("gradients", gradients, "model", "steps"),
        MemoryRow(ACTIVATIONS, _activations(config, outline, place, vocab_size), "model", "steps"),
        *_averaging(config, shapes, place, averaged),
    ]
    if config.checkpoint.asynchronous and config.num_checkpoints:
        saved = gradients + inner + sum(row.bytes for row in rows if row.where == "anchors")
        rows.insert(0, MemoryRow("copy for the checkpoint being written", saved))
    rows.insert(0, MemoryRow("Python and its libraries", base))
    if not place.cuda and config.mode == "diloco" and config.sync.merges_at_once and not config.sync.asynchronous:
        steps, rounds = (sum(row.bytes for row in rows if row.when == when) for when in ("steps", "rounds"))
        rows = [row for row in rows if row.when != ("steps" if steps < rounds else "rounds")]
    on_gpu = {"model"} if config.sync.offload else {"model", "anchors"}
    host = {row.name: row.bytes for row in rows if not (place.cuda and row.where in on_gpu)}
    device = {row.name: row.bytes for row in rows if place.cuda and row.where in on_gpu}
    return host, device


def _averaging(config: RunConfig, shapes: Mapping[str, Shape], place: Placement, averaged: int) -> list[MemoryRow]:
    """Return what averaging needs: anchors and what is kept beside them, and what travels."""
    sync = config.sync
    copy = _FP32 * averaged
    swarm = config.engine == "swarm"
    vectors = encoded_vectors(config, shapes, 1 if swarm else place.ranks)  # in a swarm every rank has the bytes of all
    moments = [] if place.alone and not config.elastic else moments_vectors(config, shapes)
    encoded = sum(
        vector.num_bytes + (0 if vector.mean is vector else vector.mean.num_bytes) for vector in vectors + moments
    )
    lossless = vectors[0].codec.lossless
    whole_gradient = encoded + copy * (1 if lossless else 2)  # encoded and decoded as a whole
    if config.mode == "data-parallel":
        return [MemoryRow("encoded and decoded gradient", whole_gradient)]
    kept = {name: copy * copies for name, copies in kept_copies(config).items()}
    rows = [MemoryRow(name, size, "anchors") for name, size in kept.items()]
    if sync.asynchronous:  # engines/asynchronous.py
        return [
            *rows,
            MemoryRow("encoded outer gradient", encoded),
            MemoryRow("anchor that arrives, and the way to it", 3 * copy),
            # Once more while it is saved, and what arrives for it.
            MemoryRow(ANCHOR_OF_WORKER_0, 2 * anchor_copies(config) * copy + encoded * place.workers),
        ]
    if not place.alone or config.elastic or not lossless or not sync.merges_at_once or sync.prune is not None:
        rows += [
            MemoryRow("encoded outer gradient", encoded, when="rounds"),
            MemoryRow("error feedback of the round in flight", kept["error feedback"], when="rounds"),
        ]
        if sync.overlap_steps and not place.cuda and place.ranks == 1:  # outer/background.py
            largest = max(vector.layout.numel for vector in vectors)
            rows.append(MemoryRow("parameters and anchor of the round in flight", 2 * _FP32 * largest))
        if config.engine == "bucket":
            largest_mean = max(vector.mean.num_bytes for vector in vectors)
            rows.append(MemoryRow("ranges of a mean, until all are there", largest_mean, when="rounds"))
        if config.engine == "swarm":
            rows.append(MemoryRow("shared with the network process", 2 * encoded))
        if moments:
            rows.append(MemoryRow("second moments, decoded", _FP32 * moments[0].layout.numel, when="rounds"))
        if sync.warm_start and not place.alone and not config.elastic:  # as in data-parallel training
            rows.append(MemoryRow("encoded and decoded gradient of the warm start", whole_gradient))
    return [row for row in rows if row.bytes]


def network_memory(config: RunConfig, shapes: Mapping[str, Shape], base: int) -> dict[str, int]:
    """Return the memory of the processes that carry a swarm worker's rounds; nothing with another engine."""
    if config.engine != "swarm":
        return {}
    from diloco.swarm.node.recent_rounds import MAX_BYTES, MAX_ROUNDS  # of the extra `swarm`

    means = [vector.mean.num_bytes for vector in encoded_vectors(config, shapes) + moments_vectors(config, shapes)]
    kept = min(MAX_ROUNDS * max(means), max(max(means), MAX_BYTES))
    return {"Python and its libraries": base, "p2pd": _P2PD_BYTES, "means of the last rounds": kept}


def moments_vectors(config: RunConfig, shapes: Mapping[str, Shape]) -> list[EncodedVector]:
    """Return what travels of AdamW's second moments, without its memory: one vector, or none."""
    if config.mode != "diloco" or config.sync.second_moment_every is None:
        return []
    every = sum(torch.Size(shape).numel() for shape in shapes.values())
    adamw = inner_elements(config, shapes) - every  # which has two elements for a parameter, and Muon one
    return [EncodedVector(codec(moments_codec(config.sync.codec)), PartLayout(adamw), _META)]


def inner_elements(config: RunConfig, shapes: Mapping[str, Shape]) -> int:
    """Return the elements of the inner optimizer's state: two of each parameter, one where Muon has it."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    muon = [
        name for name, shape in shapes.items() if config.inner.optimizer == "muon" and is_hidden_matrix(name, shape)
    ]
    return 2 * sum(sizes.values()) - sum(sizes[name] for name in muon)


# Activations


def _activations(config: RunConfig, outline: LanguageModel, place: Placement, vocab_size: int) -> int:
    """Return the activations of one micro-batch, in bytes. Gradients count in full beside them, though they are freed
    before a forward pass: malloc and the GPU's allocator reuse little of the one's memory for the other."""
    rows = max(1, config.training.batch_size // place.ranks // config.training.least_accumulation)
    length = config.data.sequence_length
    short = place.precision in ("bf16", "fp16")
    if isinstance(outline, NativeModel):
        wanted = config.compute.compile
        large = outline.config.num_parameters() >= WORTH_COMPILING
        return native_activations(
            outline.config,
            rows,
            length,
            short=short,
            compiled=place.cuda and large if wanted is None else wanted,
            fused_head=place.cuda and place.precision == "bf16",
            recomputed=config.compute.checkpoint_activations,
        )

    def build() -> LanguageModel:
        return model_outline(config.model, vocab_size=vocab_size, sequence_length=length, device="cpu")

    traced = traced_peak(build, rows, length, precision=SHORT_TYPES.get(place.precision))
    return traced + _adapter_activations(config, outline, rows * length)


def _adapter_activations(config: RunConfig, outline: LanguageModel, tokens: int) -> int:
    """Return what adapters keep besides: their inputs are kept for a trained matrix too, so the products with A, and
    the gradients of these. Adapters cannot be put into a model whose tensors have no memory."""
    adapters = sum(p.requires_grad for p in outline.parameters()) // 2 if config.lora.rank else 0
    return 2 * _FP32 * tokens * adapters * (config.lora.rank or 0)


def native_activations(
    shape: ModelConfig,
    rows: int,
    length: int,
    *,
    short: bool = False,
    compiled: bool = False,
    fused_head: bool = False,
    recomputed: bool = False,
) -> int:
    """Return the activations of our transformer, in bytes.

    A block keeps for its backward pass, of each token (D: hidden_size, I: intermediate_size, Q and K: the widths of all
    heads and key/value heads): its input and the middle of the residual stream, of each norm the scaled input and the
    output (6 D); q, k, v, the attention's output and its sums (2 Q + 2 K + heads); gate, its activation, up and their
    product (4 I). In a short type the norms still compute in fp32; a compiled block computes cheap things again instead
    of keeping them. The logits are there three times when the backward pass begins.

    `short`: computed in bf16 or fp16; `fused_head`: the logits come a chunk at a time (models/native/head.py);
    `recomputed`: compute.checkpoint_activations.
    """
    tokens = rows * length
    D, I = shape.hidden_size, shape.intermediate_size  # noqa: E741
    Q, K, heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.num_heads
    if short:
        block = (8 * D + 6 * I if compiled else 20 * D + 8 * I) + 4 * Q + 4 * K + 4 * heads
    else:
        block = 4 * ((4 * D + 3 * I if compiled else 6 * D + 4 * I) + 2 * Q + 2 * K + heads)
    blocks = block * shape.num_layers
    if recomputed:
        blocks = (2 if short else 4) * D * shape.num_layers + block
    logits = _LOGITS * 4 * tokens * shape.vocab_size
    if fused_head:
        logits = 2 * min(tokens, ROWS_AT_ONCE) * shape.vocab_size
    cast = 2 * shape.num_parameters() if short and not compiled else 0  # the weights in that type
    return tokens * (blocks + 4 * 4 * D) + logits + cast


def traced_peak(
    build: Callable[[], LanguageModel], rows: int, length: int, *, precision: torch.dtype | None = None
) -> int:
    """Return the most that a forward and backward pass holds at a time, without parameters and their gradients.

    `build` is called where tensors have no memory.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    live = _LiveBytes()
    cast: AbstractContextManager[Any] = nullcontext() if precision is None else torch.autocast("cpu", precision)
    with fake:
        model = build()
        tokens = torch.zeros(rows, length + 1, dtype=torch.int64)
    for tensor in (*model.parameters(), *model.buffers()):
        live.ignore(tensor)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    with fake, live:
        with cast:
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
    return live.peak


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._known: dict[int, Any] = {}

    def ignore(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            self._live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self._live += size
        self.peak = max(self.peak, self._live)
