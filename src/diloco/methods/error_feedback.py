"""Error feedback of outer gradients: what a codec leaves out of a round is sent with later ones (arXiv 2508.15706).

How is in codecs/error_feedback.py. This is when: an error changes once a round has this worker's contribution in its
mean, and goes where the worker's parameters go.
"""

import torch
from torch import Tensor

from diloco.codecs.error_feedback import ErrorFeedback
from diloco.outer.method import LaneFragment, Means, Method, Options, SpanEncoder


class Feedback(Method):
    """`sync.error_feedback`: the errors of all fragments of parameters; counted buffers have none."""

    @classmethod
    def chosen(cls, options: Options) -> "Feedback | None":
        decay = options.sync.feedback_decay
        return None if decay is None else cls(decay, on_cpu=options.sync.offload)

    def __init__(self, decay: float, *, on_cpu: bool) -> None:
        """`decay` is β. `on_cpu`: contributions are in CPU memory, whatever the device of the parameters."""
        self._decay = decay
        self._on_cpu = on_cpu
        self._errors: dict[int, list[tuple[int, ErrorFeedback]]] = {}  # by fragment: (lane, its error)

    def encoder(self, place: LaneFragment) -> SpanEncoder | None:
        if place.group.buffers:
            return None
        device = torch.device("cpu") if self._on_cpu else place.fragment.device
        feedback = ErrorFeedback(place.fragment.numel, self._decay, device)
        self._errors.setdefault(place.index, []).append((place.lane, feedback))
        return feedback.encode

    def of(self, index: int) -> list[ErrorFeedback]:
        """The errors of a fragment, one for each lane that has it."""
        return [feedback for _, feedback in self._errors.get(index, [])]

    def ended(self, index: int, means: Means) -> None:
        for lane, feedback in self._errors.get(index, []):
            feedback.end_round(None if means is None else means[lane])

    def work_dropped(self, index: int) -> None:
        for feedback in self.of(index):
            feedback.clear()

    def saved_tensors(self, index: int, means: Means) -> dict[str, list[Tensor]]:
        errors = self._errors.get(index, [])
        if not errors:
            return {}
        return {"outer.error": [error.error_after(None if means is None else means[lane]) for lane, error in errors]}
