"""What `diloco lab` and `python -m diloco.lab` do: list, run, tune, report, new."""

import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from diloco.atomic_files import write_file
from diloco.errors import ConfigError
from diloco.lab.claims import FEWEST_SEEDS
from diloco.lab.experiment import Experiment, load
from diloco.lab.experiments import EXPERIMENTS, experiment_of
from diloco.lab.report.writing import write_report
from diloco.lab.results import TUNING_SEED, ResultFolder, Setting, Tuned, key_of
from diloco.lab.run_options import RunOptions
from diloco.lab.runs import ArmTask, Conditions, Runner, Say, check_seeds, code_of, setting_of, tasks_of
from diloco.lab.scales import Scale, scale_of
from diloco.lab.texts import Texts
from diloco.lab.tuning import Place, best
from diloco.own_command import command


def list_experiments(scale_name: str, say: Say) -> None:
    """Each experiment with its source, arms and claims."""
    scale = scale_of(scale_name)
    say(f"scale {scale.name}: {scale.described()}")
    for experiment in EXPERIMENTS.values():
        claims = len(experiment.claims(scale))
        count = f"{len(experiment.arms(scale))} arms, {claims} claim{'' if claims == 1 else 's'}"
        say(f"  {experiment.name:15} {experiment.title} ({experiment.source}): {count}")


def chosen(names: Sequence[str], everything: bool) -> list[Experiment]:
    """The named experiments; a name that ends with .py is a file of one's own."""
    if everything and names:
        raise ConfigError(f"--all and {', '.join(names)}: give one of the two")
    if not everything and not names:
        raise ConfigError("name one or more experiments (diloco lab list), a file of your own, or --all")
    return list(EXPERIMENTS.values()) if everything else [_find(name) for name in names]


def _find(name: str) -> Experiment:
    return load(Path(name)) if name.endswith(".py") else experiment_of(name)


def run(experiments: Sequence[Experiment], options: RunOptions, say: Say) -> int:
    """Run the arms that are not finished; the number that remain."""
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
    """Search the numbers of the experiments' methods, one experiment after another; the scale with what was found.

    What one experiment found is what the next one begins with: the inner rate of t2, say, is that of f6.
    """
    texts = _texts(options)
    scale = scale_of(options.scale)
    seeds = tuning_seeds(options)
    for experiment in experiments:
        if experiment.tuning is None:
            having = ", ".join(other.name for other in EXPERIMENTS.values() if other.tuning is not None)
            raise ConfigError(f"the experiment {experiment.name} has nothing to tune: those that have are {having}")
    setting = setting_of(texts, {experiment.text for experiment in experiments})
    ResultFolder(options.folder).begin(setting)
    with Runner(_conditions(texts, options, experiments), say) as runner:
        for experiment in experiments:
            scale = search([experiment], scale, seeds, setting, runner, say)
    return scale


def search(
    experiments: Sequence[Experiment], scale: Scale, seeds: Sequence[int], setting: Setting, runner: Runner, say: Say
) -> Scale:
    """Walk all searches of these experiments together, and write what they found to the folder's TUNED file."""
    losses_by_place: dict[tuple[str, str], dict[Place, float]] = {}
    searches = [
        (experiment, made)
        for experiment in experiments
        if experiment.tuning is not None
        for made in experiment.tuning(scale)
    ]
    folder = ResultFolder(runner.conditions.folder)
    while True:
        wanted = [
            (experiment, made, place)
            for experiment, made in searches
            for place in made.wanted(losses_by_place.setdefault((experiment.name, made.name), {}))
        ]
        if not wanted:
            break
        tasks = {
            key_of(made.arm(place), seed, setting.texts[experiment.text]): ArmTask(
                key_of(made.arm(place), seed, setting.texts[experiment.text]),
                code_of(experiment, runner.conditions.how),
                f"{experiment.name}: {made.name}, {made.described(place)}",
                made.arm(place),
                seed,
                experiment.text,
            )
            for experiment, made, place in wanted
            for seed in seeds
        }
        if runner.run(list(tasks.values())):
            say("there was no time for all candidates: run the same command again to continue")
            return scale
        for experiment, made, place in wanted:
            arm = made.arm(place)
            digest = setting.texts[experiment.text]
            losses = [finished.result.loss for seed in seeds if (finished := folder.read(key_of(arm, seed, digest)))]
            losses_by_place[experiment.name, made.name][place] = statistics.mean(losses)
    for experiment, made in searches:
        losses_of = losses_by_place[experiment.name, made.name]
        chosen_place = best(losses_of)
        ordered = sorted(losses_of, key=losses_of.__getitem__)
        say(f"{made.name}: " + "; ".join(f"{made.described(place)}: {losses_of[place]:.4f}" for place in ordered))
        edges = made.edges(chosen_place)
        if edges:
            say(f"  {', '.join(edges)} is at the end of its ladder")
        scale = scale.changed(made.changes(made.values(chosen_place)))
        tried = [made.values(place) | {"loss": losses_of[place]} for place in ordered]
        folder.add_tuned(f"{experiment.name}: {made.name}", Tuned(made.values(chosen_place), tried, edges))
    return scale


def tuning_seeds(options: RunOptions) -> range:
    """Seeds that judge nothing: no claim is judged by a seed for which rates were chosen."""
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
    """Write the report of a folder; `names`: of these experiments only, or files of one's own."""
    written = write_report(folder, chosen(names, everything=not names), to)
    for judgement in written.judgements:
        if judgement.values:
            reason = f"; {judgement.reason}" if judgement.reason else ""
            say(
                f"{judgement.verdict:14} {judgement.claim.text}: {judgement.measured_text} "
                f"(published: {judgement.claim.published}{reason})"
            )
    say(f"written: {written.html}, {written.markdown}")


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


def new(name: str, say: Say) -> Path:
    """Write an experiment of one's own, ready to run."""
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
