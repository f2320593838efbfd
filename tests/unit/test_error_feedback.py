"""Error feedback: what a codec leaves out is sent later, exactly once, whatever becomes of the rounds."""

import math

import pytest
import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import CODECS, codec
from diloco.core.config import SyncConfig
from diloco.core.fragments import PartLayout, Span
from diloco.core.outer_optimizers import SGD
from diloco.errors import ConfigError
from diloco.methods.error_feedback import ErrorFeedback, Feedback
from support.in_turn import InTurn
from support.methods import method_of
from support.problem import anchors, flat

NUMEL = 5000
LAYOUT = PartLayout(NUMEL)
WHOLE = Span(0, NUMEL, 0, LAYOUT.num_parts)
SPARSE = SyncConfig(3, "topk")


def gradient(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def sent_in(vector: EncodedVector) -> torch.Tensor:
    return vector.decode(0, LAYOUT.num_parts).clone()


def error_of(world: InTurn, worker: int) -> torch.Tensor:
    feedback = method_of(world.optimizers[worker].loop, Feedback)
    assert feedback is not None
    [error] = feedback.errors_of(0)
    return error.error


@pytest.mark.parametrize("name", ["topk", "2bit", "int4"])
def test_all_that_was_sent_and_the_error_are_all_that_was_to_be_sent(name: str) -> None:
    feedback, vector = ErrorFeedback(NUMEL, 1.0, "cpu"), EncodedVector(codec(name), LAYOUT)
    total, sent = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for seed in range(20):
        total += gradient(seed)
        feedback.encode(vector, WHOLE, gradient(seed))
        sent += sent_in(vector)
        feedback.end_round(vector)
    torch.testing.assert_close(sent + feedback.error, total, rtol=0, atol=1e-4)
    assert bool(feedback.error.any())


def test_the_error_fades_by_its_decay() -> None:
    feedback, vector = ErrorFeedback(NUMEL, 0.5, "cpu"), EncodedVector(codec("topk"), LAYOUT)
    feedback.encode(vector, WHOLE, gradient(0))
    feedback.end_round(vector)
    before = feedback.error.clone()
    feedback.encode(vector, WHOLE, gradient(1))
    assert torch.equal(feedback.error_after(vector) + sent_in(vector), before * 0.5 + gradient(1))


def test_a_round_without_this_contribution_leaves_the_error_as_it_was() -> None:
    feedback, vector = ErrorFeedback(NUMEL, 0.95, "cpu"), EncodedVector(codec("topk"), LAYOUT)
    feedback.encode(vector, WHOLE, gradient(0))
    feedback.end_round(vector)
    before = feedback.error.clone()
    feedback.encode(vector, WHOLE, gradient(1))
    first = vector.data.clone()
    feedback.end_round(None)
    assert torch.equal(feedback.error, before)
    feedback.encode(vector, WHOLE, gradient(1))
    assert torch.equal(vector.data, first)


def test_the_norm_is_that_of_what_is_sent_and_not_finite_if_anything_is_not() -> None:
    feedback, vector = ErrorFeedback(NUMEL, 0.95, "cpu"), EncodedVector(codec("topk"), LAYOUT)
    norm = float(feedback.encode(vector, WHOLE, gradient(0)))
    assert norm == pytest.approx(float(sent_in(vector).norm()), rel=1e-6)
    bad = gradient(0)
    bad[7] = math.nan
    assert not math.isfinite(float(feedback.encode(vector, WHOLE, bad)))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numel", [1, 10, 257, 1500])
def test_the_norm_covers_all_that_a_receiver_decodes_however_short_the_fragment(name: str, numel: int) -> None:
    """A swarm refuses a contribution whose parts, padding included, are longer than it claims."""
    layout = PartLayout(numel)
    feedback, vector = ErrorFeedback(numel, 0.95, "cpu"), EncodedVector(codec(name), layout)
    norm = feedback.encode(vector, Span(0, numel, 0, layout.num_parts), gradient(1)[:numel])
    received = torch.empty(layout.num_parts, layout.part_elements)
    vector.codec.decode(vector.data, received)
    assert float(received.norm()) <= float(norm) * vector.codec.norm_slack


def test_a_worker_whose_contribution_was_lost_sends_the_same_work_again() -> None:
    """Its error and its parameters stay; the other worker's error moves on."""
    world = InTurn(2, SPARSE, SGD(lr=1.0), fail_at=[(1, 1)])
    world.step(3)
    before = [error_of(world, worker).clone() for worker in range(2)]
    assert all(bool(error.any()) for error in before)
    world.step(3)
    after = [error_of(world, worker) for worker in range(2)]
    assert torch.equal(after[1], before[1]) and not torch.equal(after[0], before[0])
    world.step(3)
    assert not torch.equal(error_of(world, 1), before[1])
    assert len(set(world.digests())) == 1


def test_a_worker_that_drops_its_work_for_the_others_parameters_drops_its_error() -> None:
    world = InTurn(2, SPARSE)
    world.step(3)
    state = world.optimizers[1].loop.state
    assert bool(error_of(world, 1).any())
    state.start_from_anchor()
    assert not bool(error_of(world, 1).any())
    assert torch.equal(anchors(world.optimizers[1]), flat(world.models[1]))


def test_error_feedback_is_on_where_a_codec_needs_it() -> None:
    assert SyncConfig(codec="topk").feedback_decay == SyncConfig(codec="2bit").feedback_decay == 0.95
    assert SyncConfig(codec="int4").feedback_decay is None
    assert SyncConfig(codec="int4", error_feedback=True, error_decay=0.9).feedback_decay == 0.9
    assert SyncConfig(codec="topk", error_feedback=False).feedback_decay is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codec": "fp32", "error_feedback": True}, "no effect with codec fp32"),
        ({"codec": "int4", "error_decay": 0.9}, "no effect with codec int4 unless"),
        ({"codec": "topk", "error_decay": 0.0}, "error_decay = 0.0 must be above 0"),
        ({"codec": "topk", "error_feedback": False, "error_decay": 0.5}, "no effect"),
        ({"prune": 1.0}, "prune = 1.0 must be above 0 and below 1"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SyncConfig(**options)  # type: ignore[arg-type]


def test_a_value_that_the_mean_has_dropped_stays_in_the_error() -> None:
    feedback, vector = ErrorFeedback(NUMEL, 0.95, "cpu"), EncodedVector(codec("topk"), LAYOUT)
    feedback.encode(vector, WHOLE, gradient(0))
    sent = sent_in(vector)
    mean = sent.clone()
    dropped = torch.nonzero(sent).flatten()[::3]
    mean[dropped] = 0.0
    vector.mean.encode(0, mean)
    after = feedback.error_after(vector.mean)
    assert torch.equal(feedback.error_after(vector.mean), after)  # saving the worker in between changes nothing
    feedback.end_round(vector.mean)
    assert torch.equal(feedback.error[dropped], gradient(0)[dropped])
    kept = (sent != 0) & (mean != 0)
    assert torch.equal(feedback.error[kept], (gradient(0) - sent)[kept])
