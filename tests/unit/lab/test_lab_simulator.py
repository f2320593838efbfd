"""The simulator: k workers on one device, however they are computed, with faults and a clock."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.data.corpus import Corpus
from diloco.lab.arm import Arm, ArmResult
from diloco.lab.simulation import pretraining
from diloco.lab.simulation.batches import CorpusTokens
from diloco.lab.simulation.machines import pace_table, presence_table
from diloco.lab.simulation.replicas import ReplicaTask, Sequential, fresh, learning_rates
from diloco.lab.simulation.simulator import choose, simulate
from diloco.lab.simulation.stacked import Stacked
from diloco.training.config.run import InnerConfig
from support.synthetic_corpus import synthetic_corpus

MODEL = {
    "hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "tie_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return synthetic_corpus(tmp_path_factory.mktemp("lab") / "corpus", 64, 8000, shards=4, domains=True)


def arm(**options: Any) -> Arm:
    defaults: dict[str, Any] = {
        "model": MODEL, "workers": 3, "steps": 12, "batch_size": 2, "sequence_length": 8, "eval_points": 3,
        "eval_windows": 8, "inner": {"lr": 1e-2, "warmup_steps": 2}, "sync": {"num_inner_steps": 4, "codec": "fp32"},
    }  # fmt: skip
    return Arm("test", **defaults | options)


def run(corpus: Corpus, how: str = "stacked", **options: Any) -> ArmResult:
    return simulate(arm(**options), 0, corpus, "cpu", how=how)


def test_a_hostile_worker_harms_the_plain_mean_and_clipping_mends_some_of_it(corpus: Corpus) -> None:
    def last(**options: Any) -> float:
        return run(corpus, workers=5, steps=24, **options).curve[-1][1]

    sync = {"num_inner_steps": 4, "codec": "fp32"}
    calm, harmed = last(sync=sync), last(sync=sync, hostile=(4,))
    mended = last(sync={**sync, "merge": "clipped"}, hostile=(4,))
    assert calm < mended < harmed


def test_a_hostile_worker_trains_like_an_honest_one_until_its_round(corpus: Corpus) -> None:
    honest, hostile = run(corpus), run(corpus, hostile=(0, 1, 2))
    assert hostile.statistics[0].norm == pytest.approx(honest.statistics[0].norm)  # 2A − θ rounds


SAME = [
    {},
    {"inner": {"lr": 3e-3, "warmup_steps": 2, "optimizer": "muon"}, "pretraining_steps": 3},
    {"model": {**MODEL, "tie_embeddings": False, "num_kv_heads": 2}, "absences": ((1, 4, 8),)},
    {"mode": "data_parallel", "sync": {}, "pretraining_steps": 3},
]


@pytest.mark.parametrize("options", SAME, ids=["plain", "muon", "untied, absent", "data-parallel"])
def test_stacked_replicas_train_as_those_one_after_another(corpus: Corpus, options: dict[str, Any]) -> None:
    losses = []
    for how in ("sequential", "stacked", "stacked 2"):
        pretraining._KEPT.clear()
        losses.append([loss for _, loss in run(corpus, how, **options).curve])
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert losses[2] == pytest.approx(losses[0], abs=2e-4)
    assert abs(losses[0][-1] - losses[0][0]) > 1e-3


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_inner_optimizers_of_a_stack_have_its_state_as_torch_has_it(corpus: Corpus, optimizer: str) -> None:
    """What averages moments, say, finds them where it looks for them, and can change them."""
    text, config = CorpusTokens(corpus, torch.device("cpu")), arm().model_config(64)
    places = torch.arange(4 * 2 * 3).view(4, 2, 3) * 7
    inner = InnerConfig(lr=1e-2, optimizer=optimizer)  # type: ignore[arg-type]
    task = ReplicaTask(config, inner, text, places, learning_rates(inner, 2000, 4, 4000, text.device))
    by_kind: list[Any] = [kind(task, fresh(config, 0, text.device)) for kind in (Sequential, Stacked)]
    for replicas in by_kind:
        for _ in range(3):
            replicas.take_step()
    expected, stacked = (
        [replicas.inners[1].state[parameter] for parameter in replicas.models[1].parameters()] for replicas in by_kind
    )
    for torch_state, stacked_state in zip(expected, stacked, strict=True):
        assert torch_state.keys() == stacked_state.keys()
        for kind, tensor in torch_state.items():
            torch.testing.assert_close(stacked_state[kind], tensor, rtol=1e-3, atol=1e-6)


def test_results_come_back_from_json_as_they_were(corpus: Corpus) -> None:
    result = run(corpus, sync={"num_inner_steps": 4, "codec": "int4"}, speeds=(1.0, 1.0, 0.5))
    assert ArmResult.from_json(json.loads(json.dumps(result.as_json()))) == result
    assert result.arm.key() == arm(sync={"num_inner_steps": 4, "codec": "int4"}, speeds=(1.0, 1.0, 0.5)).key()
    assert result.arm.key() != arm().key()


def test_a_seed_gives_the_same_run_again_and_another_seed_another(corpus: Corpus) -> None:
    assert run(corpus).curve == run(corpus).curve
    assert run(corpus).curve != simulate(arm(), 1, corpus, "cpu", how="stacked").curve


def test_a_shared_beginning_is_trained_once(corpus: Corpus, tmp_path: Path) -> None:
    phases: list[str] = []
    curves = []
    for outer in ({}, {"optimizer": "sgd"}):
        pretraining._KEPT.clear()
        tested_arm = arm(pretraining_steps=5, outer=outer)
        result = simulate(
            tested_arm,
            0,
            corpus,
            "cpu",
            folder=tmp_path,
            on_progress=lambda progress: phases.append(progress.phase),
            how="stacked",
        )
        curves.append(result.curve)
    assert phases.count("pretraining") == 5
    assert curves[0][0] == curves[1][0] and curves[0][-1] != curves[1][-1]


@pytest.mark.parametrize(
    ("device", "parameters", "expected"),
    [
        ("cpu", 10_000, "stacked"),
        ("cpu", 1_300_000, "sequential"),
        ("cuda", 14_000_000, "stacked"),
        ("cuda", 150_000_000, "sequential"),
    ],
)
def test_the_way_to_compute_follows_from_the_size_and_the_kind_of_device(
    device: str, parameters: int, expected: str
) -> None:
    assert choose(parameters, torch.device(device)) == expected


def test_two_folders_compute_one_seed_in_one_way_and_give_the_same_bits(corpus: Corpus, tmp_path: Path) -> None:
    results = [simulate(arm(), 0, corpus, "cpu", folder=tmp_path / name) for name in ("a", "b")]
    assert [result.how for result in results] == ["stacked 3", "stacked 3"]
    assert results[0].curve == results[1].curve


# Faults


def test_an_absent_worker_has_no_part_in_the_mean_and_begins_at_the_anchor(corpus: Corpus) -> None:
    alone = run(corpus, workers=1)
    absent = run(corpus, workers=3, absences=((1, 0, 12), (2, 0, 12)))
    assert [loss for _, loss in absent.curve] == pytest.approx([loss for _, loss in alone.curve])
    assert [row.contributors for row in absent.statistics] == [1, 1, 1]
    assert absent.tokens == alone.tokens and absent.bytes_sent_per_worker == 0


def test_workers_join_by_the_schedule_of_adaptive_compute(corpus: Corpus) -> None:
    result = run(corpus, active_workers=(1, 2, 3))
    assert [row.contributors for row in result.statistics] == [1, 2, 3]
    assert result.tokens == (1 + 2 + 3) * 4 * 2 * 8


def test_a_slow_worker_takes_fewer_steps_or_lets_the_others_wait(corpus: Corpus) -> None:
    speeds = (1.0, 1.0, 0.5)
    waiting, fewer = run(corpus, speeds=speeds), run(corpus, speeds=speeds, slow="fewer_steps")
    assert waiting.tokens == 3 * 12 * 2 * 8 and fewer.tokens == (12 + 12 + 6) * 2 * 8
    assert waiting.simulated_seconds > 1.9 * fewer.simulated_seconds
    assert waiting.utilisation < 0.7 < 0.95 < fewer.utilisation


def test_workers_are_away_with_the_probability_and_one_always_stays(corpus: Corpus) -> None:
    many = arm(workers=5, steps=4 * 400, away=0.3)
    present = presence_table(many, 0)
    rounds = present.reshape(400, 4, 5)
    assert (rounds == rounds[:, :1]).all()  # for whole rounds
    assert present.mean() == pytest.approx(0.7, abs=0.05)
    assert (present == presence_table(many, 0)).all() and (present != presence_table(many, 1)).any()
    assert (presence_table(arm(workers=2, steps=400, away=0.99, absences=((0, 40, 400),)), 0).sum(1) == 1).mean() > 0.9
    result = run(corpus, away=0.5)
    assert (
        [row.contributors for row in result.statistics]
        == presence_table(result.arm, 0)[::4].sum(1).tolist()
        != [3, 3, 3]
    )
    assert result.tokens == presence_table(result.arm, 0).sum() * 2 * 8


def test_rounds_are_slow_with_the_probability(corpus: Corpus) -> None:
    sometimes = {"slow_rounds": (0.4, 0.25)}
    speeds = pace_table(arm(**sometimes), 0)
    slow = speeds[::4] < 1
    assert 0 < slow.sum() < slow.size and set(speeds[speeds < 1]) == {0.25}
    waiting, fewer = run(corpus, **sometimes), run(corpus, slow="fewer_steps", **sometimes)
    assert waiting.tokens == 3 * 12 * 2 * 8 and fewer.tokens == (3 * 12 - 3 * slow.sum()) * 2 * 8
    assert waiting.simulated_seconds == pytest.approx(0.1 * 4 * (3 + 3 * slow.any(1).sum()), rel=0.01)
    data_parallel = run(corpus, mode="data_parallel", sync={}, **sometimes)
    by_step = (pace_table(data_parallel.arm, 0) < 1).any(1).sum()  # each step waits for the slowest
    assert data_parallel.simulated_seconds == pytest.approx(0.1 * (12 + 3 * by_step), rel=0.01)


def test_a_dropped_worker_trains_on_and_the_anchor_is_that_of_the_others(corpus: Corpus) -> None:
    result = run(corpus, drop=0.4, steps=40, batch_size=32)
    assert result.rounds_failed > 0
    assert any(row.contributors < 3 for row in result.statistics)
    assert result.loss < result.curve[0][1]


# Data, bytes, clock


def test_a_worker_of_its_own_shards_weighs_what_they_have(corpus: Corpus) -> None:
    by_domain, mixed = run(corpus, data="shards", workers=4), run(corpus, workers=4)
    assert by_domain.curve != mixed.curve
    assert by_domain.statistics[0].cosine is not None and mixed.statistics[0].cosine is not None


def test_bytes_are_those_that_the_engine_counts(corpus: Corpus, monkeypatch: Any) -> None:
    from diloco.lab.simulation import simulator

    simulations = []

    class Watched(simulator.Workers):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            simulations.append(self)

    monkeypatch.setattr(simulator, "Workers", Watched)
    sync = {"num_inner_steps": 4, "codec": "e3m0", "fragments": 2, "overlap_steps": 1}
    result = run(corpus, sync=sync)
    counted = sum(optimizer.bytes_sent for optimizer in simulations[0].optimizers)
    assert result.bytes_sent_per_worker * 3 == counted


def test_second_moments_are_charged_in_the_rounds_in_which_they_travel(corpus: Corpus) -> None:
    sync = {"num_inner_steps": 4, "codec": "fp32"}
    never, every, rarely = (
        run(corpus, sync=sync | more).bytes_sent_per_worker
        for more in ({}, {"second_moment_every": 1}, {"second_moment_every": 3})
    )
    assert rarely - never == pytest.approx((every - never) / 3, rel=0.05)  # three rounds, and some headers


def test_the_clock_charges_the_link_and_overlap_hides_it(corpus: Corpus) -> None:
    link = {"step_seconds": 0.01, "bits_per_second": 1e7, "latency_seconds": 0.005}
    plain = run(corpus, **link)
    bytes_a_round = plain.bytes_sent_per_worker / 3
    expected = 12 * 0.01 + 3 * (8 * bytes_a_round / 1e7 + 2 * 0.005)
    assert plain.simulated_seconds == pytest.approx(expected, rel=0.01)
    assert plain.utilisation == pytest.approx(12 * 0.01 / expected, rel=0.01)
    overlapped = run(corpus, sync={"num_inner_steps": 4, "codec": "fp32", "overlap_steps": 3}, **link)
    assert overlapped.simulated_seconds < plain.simulated_seconds - 0.01


def test_data_parallel_multiplies_batch_and_updates(corpus: Corpus) -> None:
    base = {"mode": "data_parallel", "sync": {}, "workers": 1}
    batch, updates = run(corpus, batch_multiplier=4, **base), run(corpus, updates_multiplier=4, **base)
    assert batch.tokens == updates.tokens == 4 * 12 * 2 * 8
    assert batch.curve[-1][0] == 12 and updates.curve[-1][0] == 48
    assert torch.isfinite(torch.tensor(batch.loss))


# Bad arms


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": {"H": 3}}, "sync has no H"),
        ({"sync": {"warm_start": 3}}, "pretraining_steps"),
        ({"sync": {"dynamic_steps": True}}, "fewer_steps"),
        ({"sync": {"asynchronous": True}}, "asynchronous"),
        ({"speeds": (1.0,)}, "3 numbers"),
        ({"model": {"hidden_size": 3}}, "model lacks"),
        ({"mode": "data_parallel", "drop": 0.1, "sync": {}}, "data_parallel"),
        ({"batch_multiplier": 2}, "data_parallel"),
        ({"absences": ((3, 0, 1),)}, "below 3"),
        ({"away": 1.0}, "away = 1.0 must be"),
        ({"mode": "data_parallel", "away": 0.1, "sync": {}}, "away"),
        ({"slow_rounds": (0.1,)}, "a probability and a speed"),
        ({"slow": "fewer_steps"}, "or slow_rounds"),
    ],
)
def test_an_arm_that_cannot_be_is_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arm(**options).model_config(64)


def test_a_step_without_any_worker_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="no worker is there in step 8"):
        run(corpus, workers=2, absences=((0, 8, 12), (1, 0, 9)))


def test_an_unknown_way_to_compute_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="stacked N"):
        run(corpus, "piled")
