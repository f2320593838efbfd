"""Running many arms: each once, in order, resumable, within a budget; and the report of what they gave."""

import ast
import json
import os
import shlex
import sys
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import app
from diloco.codecs.registry import CODECS
from diloco.core.config import FEWEST_TO_MERGE, OUTER_NUMBERS
from diloco.core.merges import MERGES
from diloco.core.outer_optimizers import OUTER_OPTIMIZERS
from diloco.errors import ConfigError, DiLoCoError
from diloco.lab import commands, gpu_sharing, runs, scales, tasks
from diloco.lab.__main__ import main
from diloco.lab.arm import Arm, ArmResult, Progress
from diloco.lab.code import code_of_file
from diloco.lab.commands import TEMPLATE
from diloco.lab.experiment import load
from diloco.lab.experiments import EXPERIMENTS
from diloco.lab.report.summary import summarise
from diloco.lab.report.writing import write_report
from diloco.lab.results import ResultFolder
from diloco.lab.run_options import RunOptions
from diloco.lab.tuning import INNER_LRS

T2, F8 = EXPERIMENTS["t2"], EXPERIMENTS["f8"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A scale of a few steps, and a cache of its own."""
    tiny = replace(
        scales.SCALES["smoke"], workers=2, steps=6, pretraining_steps=2, H=3, batch_size=1, sequence_length=8,
        eval_windows=4, vocab_size=300, text_bytes=100_000, smoke=False,
    )  # fmt: skip
    monkeypatch.setitem(scales.SCALES, "smoke", tiny)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Arms give made-up results at once: what was asked for, in its order."""
    calls: list[tuple[str, int]] = []

    def simulate(arm: Arm, seed: int, corpus: object, device: object, **_: object) -> ArmResult:
        calls.append((arm.key(), seed))
        loss = 3.0 + 0.001 * seed + (0.1 if arm.mode == "data_parallel" else 0.2 * arm.drop)
        return ArmResult(
            arm, seed, ((0, 4.0), (arm.steps, loss)), 3.0, 2, 0, 1e6, 1e8, 10.0, 0.9, (), 1000, 100, 1.0, 0.1, None,
            "not at all", "0" * 64, "0", {"device": "none", "torch": "none"},
        )  # fmt: skip

    monkeypatch.setattr(runs, "simulate", simulate)
    return calls


def _run(*experiments: object, seeds: int = 3, **options: object) -> list[str]:
    lines: list[str] = []
    run_options = RunOptions(seeds=seeds, out=Path("out"), device="cpu", **options)  # type: ignore[arg-type]
    commands.run(experiments, run_options, lines.append)  # type: ignore[arg-type]
    return lines


def test_an_arm_that_two_experiments_share_runs_once_and_never_again(simulated: list[tuple[str, int]]) -> None:
    _run(T2, F8)
    assert len(simulated) == len(set(simulated)) == 3 * (4 + 5 - 1)
    simulated_before = list(simulated)
    assert "all finished" in _run(T2, F8)[-2]
    assert simulated == simulated_before
    assert [seed for _, seed in simulated[:6]] == [0, 1, 2, 0, 1, 2]  # the first arm has all its seeds first


def test_arms_of_other_code_are_told_and_run_again_unless_any_code_counts(
    simulated: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(F8)
    monkeypatch.setattr(tasks, "simulation_code", lambda: "changed")
    lines = _run(F8, any_code=True)
    assert lines[0] == "15 arms and seeds, 15 of them finished already" and len(simulated) == 15
    lines = _run(F8)
    assert lines[0] == "15 arms and seeds, 0 of them finished already" and "15 of the others" in lines[1]
    assert len(simulated) == 30
    finished = ResultFolder(Path("out")).read(next((Path("out") / "results").glob("*-changed.json")).stem[:-8])
    assert finished is not None and finished.date


def test_a_run_names_the_command_that_reports_it(simulated: list[tuple[str, int]]) -> None:
    assert _run(F8)[-1].endswith("lab report out f8")
    Path("my idea.py").write_text(TEMPLATE.replace("NAME", "idea"))
    assert _run(load(Path("my idea.py")))[-1].endswith(
        "lab report out " + shlex.quote(str(Path("my idea.py").resolve()))
    )


OWN = """
from dataclasses import dataclass
from diloco.codecs.floats import Float32
from diloco.codecs.registry import CODECS
import torch
from diloco.core.config import FEWEST_TO_MERGE, OUTER_NUMBERS
from diloco.core.merges import MERGES
from diloco.core.outer_optimizers import OUTER_OPTIMIZERS, SGD
from diloco.lab.experiment import Experiment

FACTOR = 1.0

@dataclass(frozen=True)
class Mine(SGD):
    name = "mine"
    def update(self, theta, delta, state, round_number):
        super().update(theta, delta * FACTOR, state, round_number)

class Plain(Float32):
    name = "plain"

OUTER_OPTIMIZERS["mine"] = Mine
OUTER_NUMBERS["mine"] = {"lr": 1.0}
CODECS["plain"] = Plain

def nothing(values, weights, out, scales):
    out.zero_()
    return torch.zeros(len(values))

MERGES["nothing"] = nothing
FEWEST_TO_MERGE["nothing"] = 2

def arms(scale):
    own = {f"lr {lr}": scale.diloco(outer={"optimizer": "mine", "lr": lr}, sync={"codec": "plain"}) for lr in (0.5, 1)}
    return own | {"nothing": scale.diloco(sync={"merge": "nothing"})}

EXPERIMENT = Experiment("own", "own", "own", arms, lambda scale: ())
"""


@pytest.mark.slow
def test_an_experiments_own_optimizer_codec_and_merge_work_in_every_process() -> None:
    Path("own.py").write_text(OWN)
    try:
        experiment = load(Path("own.py"))
        assert _run(experiment, seeds=1, processes=2)[-2] == "all finished"
        [nothing] = [result for result in _results() if result.arm.sync.get("merge") == "nothing"]
        assert len({loss for _, loss in nothing.curve}) == 1  # its anchor never moves
    finally:
        for registry, name in (
            (OUTER_OPTIMIZERS, "mine"), (OUTER_NUMBERS, "mine"), (CODECS, "plain"),
            (MERGES, "nothing"), (FEWEST_TO_MERGE, "nothing"),
        ):  # fmt: skip
            registry.pop(name, None)  # type: ignore[attr-defined]


def _results() -> list[ArmResult]:
    return [ArmResult.from_json(json.loads(path.read_text())["result"]) for path in Path("out/results").glob("*.json")]


def test_what_an_experiment_file_adds_counts_as_code_and_its_arms_and_docstrings_do_not(tmp_path: Path) -> None:
    path = tmp_path / "own.py"

    def code(text: str) -> str:
        path.write_text(text)
        return code_of_file(path, {"arms", "claims", "figures"})

    assert code(OWN) != "" and code(OWN) == code('"""Words."""\n' + OWN.replace("(0.5, 1)", "(0.5, 1, 2)"))
    assert code(OWN) != code(OWN.replace("FACTOR = 1.0", "FACTOR = 100.0"))
    assert code(TEMPLATE) == ""


def test_the_hash_of_code_does_not_depend_on_empty_fields_that_a_later_python_adds_to_its_syntax_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    before = code_of_file(path, {"arms"})
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*ast.FunctionDef._fields, "of_tomorrow"))
    monkeypatch.setattr(ast.FunctionDef, "of_tomorrow", [], raising=False)
    assert code_of_file(path, {"arms"}) == before
    path.write_text("x = f(None)\n")
    assert code_of_file(path, set()) == "c9c4d83f0d", "the same on every version of Python"


def test_tuning_has_seeds_of_its_own_and_walks_until_the_best_place_has_worse_neighbours(
    simulated: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The made-up loss is lowest at an inner rate that is two rungs from where the walk begins, and never for DP."""
    made_up = runs.simulate

    def simulate(arm: Arm, seed: int, *rest: Any, **options: Any) -> ArmResult:
        if arm.mode == "data_parallel":
            distance = -log2(arm.inner_config.lr)
        else:
            momentum = arm.outer_config.momentum
            assert momentum is not None
            distance = abs(log2(arm.inner_config.lr / 0.016)) + abs(momentum - 0.7)
        return replace(made_up(arm, seed, *rest, **options), curve=((0, 4.0), (arm.steps, 20.0 + distance)))

    monkeypatch.setattr(runs, "simulate", simulate)
    lines: list[str] = []
    scale = commands.tune([T2], RunOptions(out=Path("out"), device="cpu"), lines.append)
    assert {seed for _, seed in simulated} == {1000} and len(simulated) == len(set(simulated))
    assert (scale.inner_lr, scale.outer_momentum) == (0.016, 0.7)
    assert scale.data_parallel_lr == scale.one_worker_lr == INNER_LRS[-1]
    assert sum("lr 0.128 is at the end of its ladder" in line for line in lines) == 2  # both baselines
    tuned = json.loads(Path("out/tuned.json").read_text())
    assert tuned["t2: DiLoCo"]["chosen"] == {"lr": 0.016, "outer lr": 0.7, "outer momentum": 0.7}
    losses = [place["loss"] for place in tuned["t2: DiLoCo"]["tried"]]
    assert losses == sorted(losses) and tuned["t2: DiLoCo"]["unmeasured_neighbours"] == 0
    simulated_before = list(simulated)
    commands.tune([T2], RunOptions(out=Path("out"), device="cpu"), lines.append)
    assert simulated == simulated_before  # what has been measured is not measured again
    with pytest.raises(ConfigError, match="no finished arm"):
        write_report(Path("out"), [T2])  # a seed that tunes judges nothing


def test_a_later_experiment_begins_with_what_the_one_before_found(
    simulated: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = runs.simulate

    def simulate(arm: Arm, seed: int, *rest: Any, **options: Any) -> ArmResult:
        distance = abs(log2(arm.inner_config.lr / 0.016))
        return replace(made_up(arm, seed, *rest, **options), curve=((0, 4.0), (arm.steps, 20.0 + distance)))

    monkeypatch.setattr(runs, "simulate", simulate)
    scale = commands.tune([T2, EXPERIMENTS["f6"]], RunOptions(out=Path("out"), device="cpu"), lambda _: None)
    assert scale.inner_lr == 0.016
    results = [result for result in _results() if result.arm.outer.get("optimizer") == "adam"]
    assert results and all(result.arm.inner_config.lr == 0.016 for result in results)


def test_an_experiment_without_a_search_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(ConfigError, match="f8 has nothing to tune: those that have are t2, f4"):
        commands.tune([F8], RunOptions(out=Path("out"), device="cpu"), lambda _: None)


@pytest.mark.parametrize("package", ["matplotlib", "scipy"])
def test_a_report_without_a_package_of_the_extra_lab_names_that_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs? the package {package}.*\[lab\]'"):
        write_report(Path("out"), [T2])


def test_no_arm_begins_after_the_seconds_and_the_next_run_continues(simulated: list[tuple[str, int]]) -> None:
    assert "12 remain" in _run(T2, seconds=0.0)[-1]
    assert simulated == []
    assert "all finished" in _run(T2)[-2]


def test_an_arm_that_fails_is_named_and_the_others_finish(
    simulated: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = runs.simulate

    def fail(arm: Arm, *rest: object, **options: object) -> ArmResult:
        if arm.drop == 0.5:
            raise RuntimeError("out of memory")
        return works(arm, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "simulate", fail)
    with pytest.raises(
        DiLoCoError, match="2 arms failed, the first one: f8: 50% dropped, seed 0: failed: out of memory"
    ):
        _run(F8, seeds=1)
    assert len(simulated) == 3


def test_a_folder_of_another_text_is_refused(simulated: list[tuple[str, int]]) -> None:
    _run(T2, seeds=1)
    Path("other.txt").write_text("words and more words\n" * 5000)
    with pytest.raises(ConfigError, match="another text"):
        _run(T2, seeds=1, text="other.txt")


def test_a_folder_takes_experiments_on_another_text_one_after_the_other(simulated: list[tuple[str, int]]) -> None:
    _run(T2, EXPERIMENTS["f5"], seeds=1)
    assert "all finished" in _run(T2, seeds=1)[-2]
    assert set(ResultFolder(Path("out")).setting().texts) == {"text", "domains"}


def test_the_report_gives_means_published_values_and_verdicts(simulated: list[tuple[str, int]]) -> None:
    _run(T2, F8)
    report = write_report(Path("out"), [T2, F8])
    page, markdown = report.html.read_text(), report.markdown.read_text()
    verdicts = {judgement.claim.text: judgement.verdict for judgement in report.judgements}
    assert verdicts["DiLoCo has a lower perplexity than one worker alone"] == "holds"
    assert verdicts["Dropping 50% of the communication costs at most 3% of perplexity"] == "does not hold"
    assert "| DiLoCo | 20.11 ± 0.02 |" in markdown and "16.23" in markdown
    assert "figures/t2.svg" in markdown and Path("out/figures/t2.svg").is_file()
    assert page.count("<svg") == 2 and "<script" not in page and "src=" not in page


def test_perplexities_in_a_table_are_of_seeds_that_all_its_arms_have(simulated: list[tuple[str, int]]) -> None:
    _run(T2, seeds=3)
    for path in Path("out/results").glob("*.json"):
        arm, seed = json.loads(path.read_text())["result"]["arm"], int(path.name.split("-")[2])
        if arm["mode"] == "data_parallel" and arm["workers"] > 1 and seed == 0:
            path.unlink()
    folder = ResultFolder(Path("out"))
    summary = summarise(T2, scales.SCALES["smoke"], folder, folder.setting().texts["text"])
    assert {tuple(arm.by_seed) for arm in summary.at_common_seeds().arms} == {(1, 2)}
    text = write_report(Path("out"), [T2]).markdown.read_text()
    assert "| 1–2 |" in text and "| 0–2 |" in text  # changes are of all seeds that two arms share


def test_the_report_makes_no_claim_of_two_seeds(simulated: list[tuple[str, int]]) -> None:
    _run(T2, seeds=2)
    report = write_report(Path("out"), [T2])
    assert {judgement.verdict for judgement in report.judgements} == {"not resolved"}
    assert "2 of the 3 seeds" in report.markdown.read_text()


def test_the_report_of_a_smoke_test_makes_no_claim(
    simulated: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(T2)
    assert "holds" in {judgement.verdict for judgement in write_report(Path("out"), [T2]).judgements}
    monkeypatch.setitem(scales.SCALES, "smoke", replace(scales.SCALES["smoke"], smoke=True))
    report = write_report(Path("out"), [T2])
    printed: list[str] = []
    assert {judgement.verdict for judgement in report.judgements} == {"not resolved"}
    assert "not resolved (a smoke test's numbers mean nothing)" in report.markdown.read_text()
    commands.report(Path("out"), ["t2"], None, printed.append)
    assert printed[0].startswith("not resolved") and "a smoke test's numbers mean nothing" in printed[0]


def test_real_arms_of_an_experiment_of_ones_own_give_results_and_a_report() -> None:
    """`diloco lab new`, `run`, `report`, with nothing made up: the shortest cut of `diloco lab run --all`."""
    printed: list[str] = []
    path = commands.write_new_experiment("idea", printed.append)
    experiments = commands.find_experiments([str(path)], everything=False)
    _run(*experiments, EXPERIMENTS["streaming"], seeds=1)
    records = [json.loads(result_path.read_text()) for result_path in Path("out/results").glob("*.json")]
    assert len(records) == 4 + 8 - 1  # two fragments are as many as this model has blocks
    assert all(record["code"] and record["result"]["machine"] and record["result"]["arm"] for record in records)
    page = write_report(Path("out"), experiments).html.read_text()
    assert "the regime is not checked" not in page and "One worker has a perplexity of" in page
    assert ResultFolder(Path("out")).seeds() == [0]


def test_a_line_is_fitted_through_the_logarithms(simulated: list[tuple[str, int]], monkeypatch: Any) -> None:
    made_up = runs.simulate

    def simulate(arm: Arm, seed: int, *rest: Any, **options: Any) -> ArmResult:
        loss = 3.0 - 0.02 * log2(arm.workers) + 0.01 * log2(arm.sync_config.num_inner_steps)
        return replace(made_up(arm, seed, *rest, **options), curve=((0, 4.0), (arm.steps, loss)))

    monkeypatch.setattr(runs, "simulate", simulate)
    experiment = EXPERIMENTS["workers_and_h"]
    _run(experiment, seeds=1)
    text = write_report(Path("out"), [experiment]).markdown.read_text()
    assert "-1.98% ± 0.00% with each doubling of the workers, +1.01% ± 0.00% with each doubling of H" in text
    assert "explains 100% of the variance" in text


def test_both_command_lines_give_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    called_with: list[RunOptions] = []
    monkeypatch.setattr(commands, "run", lambda *arguments: called_with.append(arguments[1]))
    words = ["run", "t2", "--scale", "cpu", "--seeds", "2", "--out", "here", "--seconds", "9", "--how", "sequential"]
    words += ["--save-seconds", "5"]
    assert main(words) == 0
    app(["lab", *words], result_action="return_value")
    assert (
        called_with[0]
        == called_with[1]
        == RunOptions("cpu", 2, Path("here"), seconds=9.0, how="sequential", save_seconds=5.0)
    )


def test_an_arm_that_takes_long_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds are long, and a step takes two of them."""
    now = [0.0]
    printed: list[str] = []
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    lines = runs._ProgressLines("t2: diloco, seed 0", printed.append)
    for step in range(1, 13):
        now[0] += 2.0
        lines(Progress("diloco", 0, "training", step, 100, None))
    assert printed == [
        "t2: diloco, seed 0: step 5 of 100, about 3 min left",
        "t2: diloco, seed 0: step 10 of 100, about 3 min left",
    ]


@pytest.mark.parametrize("exit_code", [0, 3])
def test_the_gpu_is_shared_by_a_service_that_ends_with_the_run(
    exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for NVIDIA's command writes down how it was called and where it was told to listen."""
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    log = tmp_path / "calls"
    control.write_text(
        f'#!/bin/sh\n[ "$1" = -d ] && {{ echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {log}; exit {exit_code}; }}\n'
        f'read word; echo "$word $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(control.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(gpu_sharing, "_MPS_RUNNING", tmp_path / "not there")
    printed: list[str] = []
    with gpu_sharing.shared_gpu(printed.append):
        folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    calls = log.read_text().splitlines()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    if exit_code:
        assert len(calls) == 1 and folder is None and "take turns on the GPU" in printed[0]
    else:
        assert calls == [f"start {folder}", f"quit {folder}"] and not printed


def test_a_service_that_runs_already_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\nexit 9\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    printed: list[str] = []
    with gpu_sharing.shared_gpu(printed.append):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/somewhere"
    assert not printed


def test_the_minutes_on_an_h200_are_near_those_that_were_measured() -> None:
    """An arm of eight workers took 6.2 s at 1m and 13 s at 4m, in a queue of many; a beginning counts once a seed."""
    for name, measured in (("1m", 6.2), ("4m", 13.0)):
        scale = scales.SCALES[name]

        def seconds(arms: list[Arm], scale: scales.Scale = scale) -> float:
            arm_tasks = [tasks.ArmTask("", "", "", arm, 0, "text") for arm in arms]
            return tasks.seconds_on_an_h200(arm_tasks, scale.vocab_size)

        one_arm = seconds([scale.diloco()])
        two_arms = seconds([scale.diloco(), scale.diloco(outer={"momentum": 0.5})])
        assert abs((two_arms - one_arm) / measured - 1) < 0.15
        assert one_arm > two_arms - one_arm  # compiling and the beginning
