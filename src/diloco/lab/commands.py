"""The verbs of `diloco lab` and `python -m diloco.lab`: list, run, tune, report, new."""

import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from diloco.atomic_files import write_file
from diloco.errors import ConfigError
from diloco.lab.claims import FEWEST_SEEDS
from diloco.lab.experiment import Experiment, load
from diloco.lab.experiments import EXPERIMENTS, experiment_of
from diloco.lab.report.writing import write_report
from diloco.lab.results import TUNING_SEED, ResultFolder, SearchRecord, Setting, key_of
from diloco.lab.run_options import RunOptions
from diloco.lab.runs import Conditions, Runner, Say
from diloco.lab.scales import Scale, scale_of
from diloco.lab.tasks import ArmTask, check_seeds, code_of, setting_of, tasks_of
from diloco.lab.texts import Texts
from diloco.lab.tuning import Place, Search, best
from diloco.own_command import command


def print_line(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:  # the reader of the pipe, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from error


def list_experiments(scale_name: str, say: Say) -> None:
    """List the experiments, each with its source and its numbers of arms and claims."""
    scale = scale_of(scale_name)
    say(f"scale {scale.name}: {scale.described()}")
    for experiment in EXPERIMENTS.values():
        claims = len(experiment.claims(scale))
        count = f"{len(experiment.arms(scale))} arms, {claims} claim{'' if claims == 1 else 's'}"
        say(f"  {experiment.name:15} {experiment.title} ({experiment.source}): {count}")


def find_experiments(names: Sequence[str], everything: bool) -> list[Experiment]:
    """Find the named experiments, or all; a name that ends with .py is a file of the user's."""
    if everything and names:
        raise ConfigError(f"--all and {', '.join(names)}: give one of the two")
    if not everything and not names:
        raise ConfigError("name one or more experiments (diloco lab list), a file of your own, or --all")
    if everything:
        return list(EXPERIMENTS.values())
    return [load(Path(name)) if name.endswith(".py") else experiment_of(name) for name in names]


def run(experiments: Sequence[Experiment], options: RunOptions, say: Say) -> int:
    """Run the arms that are not finished. Returns the number that remain."""
    texts = _texts(options)
    setting = setting_of(texts, {experiment.text for experiment in experiments})
    seeds = check_seeds(FEWEST_SEEDS if options.seeds is None else options.seeds)
    tasks = tasks_of(experiments, texts.scale, seeds, setting.texts, options.how)
    ResultFolder(options.folder).begin(setting)
    with Runner(_conditions(texts, options, experiments), say) as runner:
        remaining = runner.run(tasks)
    say(f"{remaining} remain: run the same command again to continue" if remaining else "all finished")
    if not remaining:
        words = ["lab", "report", str(options.folder)]
        words += [
            str(experiment.file) if experiment.file is not None else experiment.name for experiment in experiments
        ]
        say(f"next: {command(*map(shlex.quote, words))}")
    return remaining


def tune(experiments: Sequence[Experiment], options: RunOptions, say: Say) -> Scale:
    """Search the numbers of the experiments' methods. Returns the scale with the best ones.

    The experiments are tuned one after another, and each begins with what the ones before found: f6 with the inner rate
    that t2 found, for example.
    """
    texts = _texts(options)
    scale = scale_of(options.scale)
    seeds = tuning_seeds(options)
    for experiment in experiments:
        if experiment.tuning is None:
            tunable = ", ".join(known.name for known in EXPERIMENTS.values() if known.tuning is not None)
            raise ConfigError(f"the experiment {experiment.name} has nothing to tune: those that have are {tunable}")
    setting = setting_of(texts, {experiment.text for experiment in experiments})
    ResultFolder(options.folder).begin(setting)
    with Runner(_conditions(texts, options, experiments), say) as runner:
        for experiment in experiments:
            scale = _tune_experiment(experiment, scale, seeds, setting, runner, say)
    return scale


def _tune_experiment(
    experiment: Experiment, scale: Scale, seeds: Sequence[int], setting: Setting, runner: Runner, say: Say
) -> Scale:
    """Walk all searches of an experiment together, and write what they found to tuned.json of the folder."""
    assert experiment.tuning is not None
    searches = experiment.tuning(scale)
    losses: dict[str, dict[Place, float]] = {search.name: {} for search in searches}
    digest = setting.texts[experiment.text]
    code = code_of(experiment, runner.conditions.how)
    folder = ResultFolder(runner.conditions.folder)
    while unmeasured := [(search, place) for search in searches for place in search.unmeasured(losses[search.name])]:
        tasks: dict[str, ArmTask] = {}
        for search, place in unmeasured:
            arm = search.arm(place)
            for seed in seeds:
                key = key_of(arm, seed, digest)
                name = f"{experiment.name}: {search.name}, {search.described(place)}"
                tasks[key] = ArmTask(key, code, name, arm, seed, experiment.text)
        if runner.run(list(tasks.values())):
            say("there was no time for all candidates: run the same command again to continue")
            return scale
        for search, place in unmeasured:
            arm = search.arm(place)
            finished = [folder.read(key_of(arm, seed, digest)) for seed in seeds]
            losses[search.name][place] = statistics.mean(run.result.loss for run in finished if run is not None)
    for search in searches:
        scale = _keep_best(search, losses[search.name], experiment.name, scale, folder, say)
    return scale


def _keep_best(
    search: Search, losses: dict[Place, float], experiment: str, scale: Scale, folder: ResultFolder, say: Say
) -> Scale:
    """Print and write what a search has measured. Returns the scale with the values of the best place."""
    best_place = best(losses)
    ordered = sorted(losses, key=losses.__getitem__)
    say(f"{search.name}: " + "; ".join(f"{search.described(place)}: {losses[place]:.4f}" for place in ordered))
    edges = search.edges(best_place)
    if edges:
        say(f"  {', '.join(edges)} is at the end of its ladder")
    values = search.values(best_place)
    tried = [search.values(place) | {"loss": losses[place]} for place in ordered]
    folder.add_search(f"{experiment}: {search.name}", SearchRecord(values, tried, edges))
    return scale.changed(search.changes(values))


def tuning_seeds(options: RunOptions) -> range:
    """Return the seeds to tune with. They judge nothing: no claim is judged by a seed for which rates were chosen."""
    count = len(check_seeds(1 if options.seeds is None else options.seeds))
    return range(TUNING_SEED, TUNING_SEED + count)


def _texts(options: RunOptions) -> Texts:
    return Texts(options.text, options.domains, scale_of(options.scale))


def _conditions(texts: Texts, options: RunOptions, experiments: Sequence[Experiment]) -> Conditions:
    return Conditions(
        texts,
        options.folder,
        device_of(options.device),
        seconds=options.seconds,
        processes=options.processes,
        how=options.how,
        save_seconds=options.save_seconds,
        any_code=options.any_code,
        files=tuple(experiment.file for experiment in experiments if experiment.file is not None),
    )


def report(folder: Path, names: Sequence[str], to: Path | None, say: Say) -> None:
    """Write the report of a folder; `names`: of these experiments only, or of the user's files."""
    written_report = write_report(folder, find_experiments(names, everything=not names), to)
    for judgement in written_report.judgements:
        if judgement.values:
            reason = f"; {judgement.reason}" if judgement.reason else ""
            say(
                f"{judgement.verdict:14} {judgement.claim.text}: {judgement.measured_text} "
                f"(published: {judgement.claim.published}{reason})"
            )
    say(f"written: {written_report.html}, {written_report.markdown}")


TEMPLATE = '''"""NAME: say in one sentence what you want to know.

    diloco lab run NAME.py --scale smoke --out runs/NAME-smoke
    diloco lab run NAME.py --scale cpu --seeds 3 --out runs/NAME
    diloco lab report runs/NAME NAME.py
"""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Similarity
from diloco.lab.scales import Scale

MINE = "less momentum"


def arms(scale: Scale) -> Arms:
    """Each arm is a whole method. `sync`, `outer` and `inner` are the tables of a run file (docs/configuration.md)."""
    return {
        MINE: scale.diloco(outer={"momentum": 0.6}),
        "DiLoCo": scale.diloco(),
        "data-parallel": scale.data_parallel(),
        "one worker": scale.one_worker(),
    }


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    """What you expect, as a number for each seed: 0.01 is a perplexity 1 % higher."""
    del scale
    return (
        PublishedClaim("My method beats DiLoCo", "–", lambda m: m.change(MINE, "DiLoCo"), at_most=0.0),
        PublishedClaim(
            "It is within 2 % of data parallelism", "–", lambda m: m.change(MINE, "data-parallel"), at_most=0.02
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("All arms"), Similarity("How alike the workers' outer gradients are", (MINE, "DiLoCo")))


EXPERIMENT = Experiment(
    name="NAME",
    title="DiLoCo with less outer momentum",
    source="an idea of mine",
    arms=arms,
    claims=claims,
    figures=figures,
)
'''
"""The file that `diloco lab new NAME` writes."""


def write_new_experiment(name: str, say: Say) -> Path:
    """Write the file of a new experiment, ready to run."""
    if not name.isidentifier():
        raise ConfigError(f"{name!r} cannot be a Python module: use letters, digits and _")
    path = Path(f"{name}.py")
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another name")
    write_file(path, TEMPLATE.replace("NAME", name).encode())
    say(f"wrote {path}: change its arms and claims, then")
    say(f"  diloco lab run {path} --scale smoke --out runs/{name}-smoke     does it run?")
    say(f"  diloco lab run {path} --scale cpu --seeds 3 --out runs/{name}")
    say(f"  diloco lab report runs/{name} {path}")
    return path


def device_of(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: this machine has no GPU that PyTorch can use")
    return name
