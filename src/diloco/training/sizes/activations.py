"""The memory of one forward and backward pass beside the model, in bytes: estimated for our transformer from its shape,
for other models by a pass over tensors that have shapes and no memory.

A block of our transformer keeps for its backward pass, of each token (D: hidden_size, I: intermediate_size, Q and K:
the widths of all heads and key/value heads): its input and the middle of the residual stream, of each norm the scaled
input and the output (6 D); q, k, v, the attention's output and its sums (2 Q + 2 K + heads); gate, its activation, up
and their product (4 I). In a short type the norms still compute in fp32; a compiled block computes cheap things again
instead of keeping them. The logits are there three times when the backward pass begins.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from diloco.models.base import LanguageModel
from diloco.models.native.config import ModelConfig
from diloco.models.native.head import ROWS_AT_ONCE

_LOGITS = 3  # log-softmax, its gradient, and that of the logits


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
    """`short`: computed in bf16 or fp16; `fused_head`: the logits come a chunk at a time (models/native/head.py);
    `recomputed`: compute.checkpoint_activations."""
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
    """The most that a forward and backward pass holds at a time, without parameters and their gradients.

    `build` is called where tensors have no memory.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    fake, live = FakeTensorMode(allow_non_fake_inputs=True), _LiveBytes()
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
        self.peak = self._live = 0
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
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            self._live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self._live += size
        self.peak = max(self.peak, self._live)
