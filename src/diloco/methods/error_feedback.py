"""Error feedback (`sync.error_feedback`): what a codec leaves out of a round is sent in later ones.

The method of EF-SGD for outer gradients (arXiv 2508.15706):

    a = β e + Δ         the outer gradient with what earlier rounds have left out
    Q(a) is sent        Q is any codec
    e ← a − Q(a)        once a round has this contribution in its mean

Where the mean of sparse contributions keeps its largest values only, those that it lacks count as not sent: each worker
keeps its own share of them in e, and no reducer needs a memory.

If the round fails, or the contribution is refused, e stays as it was: the worker's next outer gradient carries the same
work again. The error is a worker's own. It is saved with the worker and goes where its parameters go: a joiner begins
without one, and so does a worker that drops its own work for the others' parameters.
"""

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector, scratch
from diloco.core.fragments import Span
from diloco.outer.method import LaneFragment, Means, Method, Options, SpanEncoder


class ErrorFeedback:
    """The error of one fragment; `device` is where it is kept."""

    def __init__(self, numel: int, decay: float, device: torch.device | str) -> None:
        """`decay` is β."""
        self._decay = decay
        self.error = torch.zeros(numel, device=device)
        self._next_error: Tensor | None = None  # after the round in flight, if its mean has this contribution in it
        self._sent: list[tuple[EncodedVector, Span]] = []  # what a mean may lack

    @torch.no_grad()
    def encode(self, vector: EncodedVector, span: Span, delta: Tensor) -> Tensor:
        """Encode a span of the outer gradient with its error; returns the norm of what is sent, not finite if a is not.

        Of all that is sent: with 2 bits the padding of the last part is not zero, and the receivers measure it too.
        """
        if self._next_error is None:
            self._next_error = torch.empty_like(self.error)
        if span.start == 0:
            self._sent = []
        if vector.codec.means_drop_values:
            self._sent.append((vector, span))
        a = scratch("feedback", delta.shape, delta.device)
        a.copy_(self.error[span.slice]).mul_(self._decay).add_(delta)
        vector.encode(span.first_part, a)
        sent = vector.decode(span.first_part, span.num_parts, delta.device, padded=True)
        whole = torch.linalg.vector_norm(a)
        norm = torch.linalg.vector_norm(sent)
        self._next_error[span.slice].copy_(a.sub_(sent[: a.numel()]))
        return torch.where(torch.isfinite(whole), norm, whole)

    def end_round(self, mean: EncodedVector | None) -> None:
        """End the round in flight, which has this worker's contribution in its `mean`; None: it is in none."""
        self.error = self.error_after(mean)
        self._next_error = None

    @torch.no_grad()
    def error_after(self, mean: EncodedVector | None) -> Tensor:
        """Return the error that `end_round(mean)` will leave, without ending the round."""
        if mean is None or self._next_error is None:
            return self.error
        for vector, span in self._sent:
            device = vector.data.device
            values = scratch("feedback", (span.stop - span.start,), device)
            values.copy_(vector.decode(span.first_part, span.num_parts))
            dropped = mean.decode(span.first_part, span.num_parts, device) == 0
            self._next_error[span.slice].add_(values.mul_(dropped))
        self._sent = []
        return self._next_error

    def clear(self) -> None:
        self.error.zero_()
        self._next_error = None


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

    def errors_of(self, index: int) -> list[ErrorFeedback]:
        """Return the errors of a fragment, one for each lane that has it."""
        return [feedback for _, feedback in self._errors.get(index, [])]

    def ended(self, index: int, means: Means) -> None:
        for lane, feedback in self._errors.get(index, []):
            feedback.end_round(None if means is None else means[lane])

    def work_dropped(self, index: int) -> None:
        for feedback in self.errors_of(index):
            feedback.clear()

    def saved_tensors(self, index: int, means: Means) -> dict[str, list[Tensor]]:
        errors = self._errors.get(index, [])
        if not errors:
            return {}
        return {"outer.error": [error.error_after(None if means is None else means[lane]) for lane, error in errors]}
