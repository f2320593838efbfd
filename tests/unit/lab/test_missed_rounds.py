"""What a missed round costs: the four rules, the law through the costs, and the prediction of the best momentum."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.engines.local import LocalEngine
from diloco.errors import ConfigError
from diloco.lab.arm import Arm, ArmResult, MissedRule, RoundStatistics
from diloco.lab.experiments import missed_rounds
from diloco.lab.fits import fit_power_law, left_out_errors, lowest_of_parabola
from diloco.lab.report.pages import Grid, Paragraph
from diloco.lab.scales import SCALES
from diloco.lab.simulation.simulator import simulate
from support.synthetic_corpus import synthetic_corpus

MODEL = {
    "hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "tie_embeddings": True,
}  # fmt: skip
H = 2


def _weights(rule: MissedRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """The weights that each worker's contributions have, round by round; 0 where it was dropped."""
    sent: dict[int, list[float]] = defaultdict(list)
    start = LocalEngine.start_round

    def recorded(engine: Any, key: Any, contribution: Any, *rest: Any, **options: Any) -> Any:
        sent[engine.worker].append(contribution.weight)
        return start(engine, key, contribution, *rest, **options)

    arm = Arm(
        "test", model=MODEL, workers=3, steps=8 * H, batch_size=2, sequence_length=8, eval_points=1, eval_windows=8,
        inner={"lr": 1e-2, "warmup_steps": 2}, sync={"num_inner_steps": H, "codec": "fp32"}, drop=0.5, missed=rule,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "start_round", recorded)
        simulate(arm, 0, synthetic_corpus(tmp_path / "corpus", 64, 4000), "cpu", how="stacked")
    return {worker: weights[:8] for worker, weights in sent.items()}


EXPECTED = {
    "token_weighted": lambda missed: (1 + missed) * H,
    "uniform": lambda _: H,
    "age_decayed": lambda missed: H * 0.5**missed,
    "discarded": lambda _: H,
}


@pytest.mark.parametrize("rule", EXPECTED)
def test_a_contribution_after_missed_rounds_counts_by_the_rule(
    rule: MissedRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_missed = 0
    for weights in _weights(rule, tmp_path, monkeypatch).values():
        missed = 0
        for weight in weights:
            if weight:
                assert weight == pytest.approx(EXPECTED[rule](missed))
            missed = 0 if weight else missed + 1
            most_missed = max(missed, most_missed)
    assert most_missed >= 2  # the seed drops two rounds of one worker in a row


def test_a_rule_for_missed_rounds_is_refused_where_none_is_missed() -> None:
    with pytest.raises(ConfigError, match="missed = uniform is for arms with drop"):
        Arm("test", missed="uniform")
    with pytest.raises(ConfigError, match="fragments = 2"):
        Arm("test", drop=0.5, missed="uniform", sync={"fragments": 2})


def test_an_arm_that_counts_by_tokens_and_is_no_repetition_keeps_the_key_that_it_had() -> None:
    assert Arm("test").key() == "e6e3d703c352"
    assert Arm("test", repeat=1).key() != Arm("test").key()


# The law, of made-up results


def _made_up(scale_name: str = "1m") -> dict[str, list[ArmResult]]:
    """Costs that follow a law, and a best momentum that rises with the cosine of the first rounds."""
    scale = SCALES[scale_name]
    results = {}
    for name, arm in missed_rounds.arms(scale).items():
        momentum = float(arm.outer["momentum"])
        cosine = 0.2 + 0.02 * arm.workers
        best = 0.6 + 0.5 * cosine
        cost = 0.05 * arm.drop**1.5 * arm.workers**-0.5 * (1 - momentum) ** -1.0 if arm.drop else 0.0
        loss = 3.0 + cost + (0.0 if arm.drop else (momentum - best) ** 2)
        rows = tuple(RoundStatistics(40 * i, 0, arm.workers, cosine, 0.0, 1.0, 1.0, None) for i in range(12))
        result = ArmResult(
            arm, 0, ((0, 4.0), (arm.steps, loss)), 3.0, 2, 0, 1e6, 1e8, 10.0, 0.9, rows, 1000, 100, 1.0, 0.1, None,
            "not at all", "0" * 64, "0", {},
        )  # fmt: skip
        results[name] = [result, replace(result, seed=1)]
    return results


def test_the_law_is_recovered_from_costs_that_follow_it() -> None:
    scale, results = SCALES["1m"], _made_up()
    calm = {arm.key(): results[name][0].loss for name, arm in missed_rounds.arms(scale).items() if not arm.drop}
    for name, arm in missed_rounds.arms(scale).items():
        if arm.drop:  # the cost is above what the arm without drops has
            without = calm[replace(arm, drop=0.0, missed="token_weighted").key()]
            results[name] = [
                replace(result, curve=((0, 4.0), (1, result.loss - 3.0 + without))) for result in results[name]
            ]
    [words, grid, *_] = missed_rounds.analysis(scale, results)
    assert isinstance(words, Paragraph) and isinstance(grid, Grid)
    assert len(grid.rows) == 4
    for row in grid.rows:
        assert [float(cell.split(" ± ")[0]) for cell in row[1:5]] == pytest.approx([0.05, 1.5, -0.5, 1.0], rel=1e-2)
        assert row[6] == "100%" and row[8] == "0.0000"


def test_a_best_momentum_that_follows_the_cosine_is_predicted() -> None:
    *_, words = missed_rounds.analysis(SCALES["1m"], {name: r for name, r in _made_up().items() if "none" in name})
    assert isinstance(words, Paragraph) and "of so few settings" in words.text
    line = missed_rounds._prediction([0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8])
    assert "predicts the best momentum" in line and "+1.00" in line
    line = missed_rounds._prediction([0.1, 0.2, 0.3, 0.4], [0.5, 0.8, 0.5, 0.8])
    assert "does not predict" in line


def test_a_power_law_is_not_fitted_to_points_that_do_not_determine_it() -> None:
    assert fit_power_law([(0.1, 4.0), (0.3, 4.0), (0.5, 4.0), (0.2, 4.0)], [1.0, 2.0, 3.0, 4.0]) is None


def test_the_lowest_point_of_a_parabola_is_found_and_never_outside() -> None:
    assert lowest_of_parabola([0.0, 1.0, 2.0], [(x - 1.2) ** 2 for x in (0.0, 1.0, 2.0)]) == pytest.approx(1.2)
    assert lowest_of_parabola([0.0, 1.0, 2.0], [3.0, 2.0, 1.0]) == 2.0


def test_a_line_that_helps_has_a_smaller_error_at_points_left_out_than_the_mean() -> None:
    by_line, by_mean = left_out_errors([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0])
    assert by_line == pytest.approx(0.0, abs=1e-9) and by_mean > 1
