"""The memory of one process of a run, by what it holds: from the model's shapes and the code's own layouts."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragment_names import assign
from diloco.core.fragments import PartLayout
from diloco.core.lanes import Shape, shard_bounds
from diloco.core.outer_optimizers import OUTER_OPTIMIZERS
from diloco.engines.reduction import WAVES_AHEAD, waves
from diloco.methods.second_moments import moments_codec
from diloco.models.base import LanguageModel
from diloco.models.native.model import NativeModel
from diloco.models.registry import model_outline
from diloco.training.compute import SHORT_TYPES, WORTH_COMPILING
from diloco.training.config.run import RunConfig
from diloco.training.inner import is_hidden_matrix
from diloco.training.sizes.activations import native_activations, traced_peak
from diloco.training.sizes.disk import eager_copies

ACTIVATIONS = "activations, estimated"
OF_WORKER_0 = "anchor that all workers move, of worker 0 alone"
_FP32 = 4
_P2PD_BYTES = 70_000_000  # measured
_META = torch.device("meta")
_ENCODED, _ARRIVING = "encoded outer gradient", "arriving outer gradients"
_ERRORS, _MOMENTS = "error feedback of the round in flight", "second moments, decoded"
_DURING_ROUNDS = (_ENCODED, _ARRIVING, _ERRORS, _MOMENTS)


@dataclass(frozen=True)
class Place:
    """Where a run's processes compute, and with how many others they average."""

    workers: int
    """Of the whole run."""
    ranks: int = 1
    """Of each worker."""
    cuda: bool = False
    precision: str = "fp32"

    @property
    def alone(self) -> bool:
        return self.workers == 1


def encoded_vectors(config: RunConfig, shapes: Mapping[str, Shape], ranks: int = 1) -> list[EncodedVector]:
    """What travels of each fragment, of the rank that holds most, without its memory."""
    groups = assign(list(shapes), config.sync) if config.mode == "diloco" else [list(shapes)]
    layouts = [PartLayout(sum(shard_bounds(shapes[name], ranks)[1] for name in group)) for group in groups]
    return [EncodedVector(codec(config.sync.codec), layout, _META) for layout in layouts]


def process_memory(
    config: RunConfig, outline: LanguageModel, place: Place, base: int, vocab_size: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of main memory and of GPU memory, by what they hold, at the moment when a process holds most.

    `base`: the interpreter and its libraries.
    """
    shapes = {name: tuple(p.shape) for name, p in outline.named_parameters() if p.requires_grad}
    whole = sum(p.numel() for p in outline.parameters())
    own = sum(shard_bounds(shape, place.ranks)[1] for shape in shapes.values())
    trained = sum(torch.Size(shape).numel() for shape in shapes.values())
    sharded = place.ranks > 1 and config.compute.sharding == "fsdp"
    held = own if sharded else whole
    share = held / whole
    held_trained = own if sharded else trained
    model = {
        "parameters": _FP32 * held,
        "inner optimizer": round(_FP32 * share * inner_elements(config, shapes)),
    }
    step = {"gradients": _FP32 * held_trained, ACTIVATIONS: _activations(config, outline, place, vocab_size)}
    outer, travelling = _averaging(config, shapes, place, own)
    at_once = config.sync.merges_at_once and not config.sync.asynchronous
    if not place.cuda and config.mode == "diloco" and at_once:
        step, travelling = _larger(step, travelling)
    model |= step
    host = {"Python and its libraries": base}
    if config.checkpoint.asynchronous and config.num_checkpoints:
        saved = _FP32 * held_trained + model["inner optimizer"] + sum(outer.values())
        host["copy for the checkpoint being written"] = saved
    if not place.cuda:
        return host | model | outer | travelling, {}
    if config.sync.offload:
        return host | outer | travelling, model
    return host | travelling, model | outer


def _larger(step: dict[str, int], travelling: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Gradients are gone when a round begins, and what travels when it ends: only the larger of the two counts."""
    passing = {name: size for name, size in travelling.items() if name in _DURING_ROUNDS}
    if sum(step.values()) < sum(passing.values()):
        return {}, travelling
    return step, {name: size for name, size in travelling.items() if name not in passing}


def network_memory(config: RunConfig, shapes: Mapping[str, Shape], base: int) -> dict[str, int]:
    """Of the processes that carry a swarm worker's rounds; nothing with another engine."""
    if config.engine != "swarm":
        return {}
    from diloco.swarm.node.recent_rounds import MAX_BYTES, MAX_ROUNDS  # of the extra `swarm`

    means = [vector.mean.num_bytes for vector in encoded_vectors(config, shapes) + moments_vectors(config, shapes)]
    kept = min(MAX_ROUNDS * max(means), max(max(means), MAX_BYTES))
    return {"Python and its libraries": base, "p2pd": _P2PD_BYTES, "means of the last rounds": kept}


def moments_vectors(config: RunConfig, shapes: Mapping[str, Shape]) -> list[EncodedVector]:
    """What travels of AdamW's second moments, without its memory: one vector, or none."""
    if config.mode != "diloco" or config.sync.second_moment_every is None:
        return []
    every = sum(torch.Size(shape).numel() for shape in shapes.values())
    adamw = inner_elements(config, shapes) - every  # which has two elements for a parameter, and Muon one
    return [EncodedVector(codec(moments_codec(config.sync.codec)), PartLayout(adamw), _META)]


def inner_elements(config: RunConfig, shapes: Mapping[str, Shape]) -> int:
    """Elements of the inner optimizer's state: two of each parameter, one where Muon has it."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    muon = [
        name for name, shape in shapes.items() if config.inner.optimizer == "muon" and is_hidden_matrix(name, shape)
    ]
    return 2 * sum(sizes.values()) - sum(sizes[name] for name in muon)


def _averaging(
    config: RunConfig, shapes: Mapping[str, Shape], place: Place, own: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Anchor and outer momentum; and the memory of what travels."""
    vectors = encoded_vectors(config, shapes, place.ranks)
    moments = [] if place.alone and config.engine != "swarm" else moments_vectors(config, shapes)
    encoded = sum(
        vector.num_bytes + (0 if vector.mean is vector else vector.mean.num_bytes) for vector in vectors + moments
    )
    lossless = vectors[0].codec.lossless
    if config.mode == "data-parallel":  # a gradient is encoded and decoded as a whole
        return {}, {"encoded and decoded gradient": encoded + _FP32 * own * (1 if lossless else 2)}
    outer = {"anchor": _FP32 * own}
    if config.sync.asynchronous:
        return outer, _asynchronous(encoded, _FP32 * own, place.workers)
    states = len(OUTER_OPTIMIZERS[config.outer.optimizer].state_names)
    if states:
        outer["outer optimizer"] = _FP32 * own * states
    if eager_copies(config):
        outer["starts of eager updates"] = _FP32 * own * eager_copies(config)
    if config.sync.feedback_decay is not None:
        outer["error feedback"] = _FP32 * own
    swarm = config.engine == "swarm"
    if place.alone and not swarm and lossless and config.sync.merges_at_once and config.sync.prune is None:
        return outer, {}
    travelling = {_ENCODED: encoded}
    if config.sync.feedback_decay is not None:
        travelling[_ERRORS] = _FP32 * own
    if config.sync.overlap_steps and not place.cuda and place.ranks == 1:  # outer/background.py
        travelling["parameters and anchor of the round in flight"] = 2 * _FP32 * max(v.layout.numel for v in vectors)
    if swarm:
        travelling["shared with the network process"] = 2 * encoded
    elif not place.alone:
        travelling[_ARRIVING] = max(_inbox_bytes(vector, place.workers) for vector in vectors)
    if moments:
        travelling[_MOMENTS] = _FP32 * moments[0].layout.numel
    if config.sync.warm_start and not place.alone and not swarm:  # as in data-parallel training
        travelling["encoded and decoded gradient of the warm start"] = encoded + _FP32 * own * (1 if lossless else 2)
    return outer, travelling


def _asynchronous(encoded: int, copy: int, workers: int) -> dict[str, int]:
    """What travels between asynchronous workers, and what worker 0 holds (engines/asynchronous/server.py)."""
    return {
        "encoded outer gradient": encoded,
        "anchor that arrives, and the way to it": 3 * copy,
        OF_WORKER_0: 6 * copy + encoded * workers,  # where it is, where it is saved, and what arrives for it
    }


def _inbox_bytes(vector: EncodedVector, workers: int) -> int:
    """Some waves of the others' contributions to what this worker reduces (engines/torch_distributed.py)."""
    plan = list(waves(vector, workers))
    return min(WAVES_AHEAD, len(plan)) * (workers - 1) * max(plan[0].counts) * vector.shape[1] if plan else 0


def _activations(config: RunConfig, outline: LanguageModel, place: Place, vocab_size: int) -> int:
    """Of one micro-batch. Gradients count in full beside them, though they are freed before a forward pass: malloc
    and the GPU's allocator reuse little of the one's memory for the other."""
    rows = max(1, config.training.batch_size // place.ranks // config.training.least_accumulation)
    length, short = config.data.sequence_length, place.precision in ("bf16", "fp16")
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
    """What adapters keep besides: their inputs are kept for a trained matrix too, so the products with A, and the
    gradients of these. Adapters cannot be put into a model whose tensors have no memory."""
    adapters = sum(p.requires_grad for p in outline.parameters()) // 2 if config.lora.rank else 0
    return 2 * _FP32 * tokens * adapters * (config.lora.rank or 0)
