"""How one fragment's outer gradients are sent: in which bytes, and what is done to them before."""

from dataclasses import dataclass

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.error_feedback import ErrorFeedback
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.fragments import Fragment, PartLayout
from diloco.core.methods.eager import Eager
from diloco.outer.methods.second_moments import SecondMoments
from diloco.outer.tensors.groups import Group

_FEW_BITS = ("int4", "e3m0", "2bit", "topk")


@dataclass(frozen=True)
class Sending:
    """How one fragment's outer gradients are sent."""

    vector: EncodedVector
    feedback: ErrorFeedback | None = None
    prune: float | None = None
    eager: Eager | None = None
    moments: SecondMoments | None = None

    @property
    def as_it_is(self) -> bool:
        """Nothing is done to an outer gradient before it is encoded."""
        return self.feedback is None and self.prune is None and self.eager is None and self.moments is None

    @classmethod
    def of(cls, fragment: Fragment | None, group: Group, sync: SyncConfig, *, alone: bool) -> "Sending":
        """A worker alone needs no vector if nothing is changed on the way: its mean is its own outer gradient."""
        if group.moments is not None:
            return cls(group.moments.vector(sync.codec), moments=group.moments)
        how = codec("fp16" if group.buffers and sync.codec in _FEW_BITS else sync.codec)
        prune = None if group.buffers else sync.prune
        if fragment is None or (
            how.lossless and alone and sync.merges_at_once and prune is None and not sync.asynchronous
        ):
            return cls(EncodedVector(how, PartLayout(0)))
        eager = None if sync.outer_overlap == "none" else Eager(fragment, delayed=sync.outer_overlap == "delayed")
        device = torch.device("cpu") if sync.offload else fragment.device
        vector = EncodedVector(how, fragment.layout, device, pinned=sync.offload)
        if group.buffers or sync.feedback_decay is None:
            return cls(vector, None, prune, eager)
        return cls(vector, ErrorFeedback(fragment.numel, sync.feedback_decay, device), prune, eager)
