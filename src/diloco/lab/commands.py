"""What `diloco lab` and `python -m diloco.lab` do: list, run, tune, report, new."""

import shlex
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from diloco.atomic_files import write_file
from diloco.errors import ConfigError
from diloco.lab.arm import Arm
from diloco.lab.claims import FEWEST_SEEDS
from diloco.lab.experiment import Experiment, load
from diloco.lab.experiments import EXPERIMENTS, experiment_of
from diloco.lab.report.writing import write_report
from diloco.lab.results import TUNING_SEED, ResultFolder, key_of
from diloco.lab.run_options import RunOptions
from diloco.lab.runs import Run, Say, Task, Texts, check_seeds, code_of, setting_of, tasks_of
from diloco.lab.scales import Scale, scale_of
from diloco.lab.template import TEMPLATE
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
    remaining = _run(tasks, texts, options, experiments)(say)
    if not remaining:
        words = ["lab", "report", str(options.folder)]
        words += [str(one.file) if one.file is not None else one.name for one in experiments]
        say(f"next: {command(*map(shlex.quote, words))}")
    return remaining


def tune(experiment: Experiment, options: RunOptions, say: Say) -> None:
    """Run the candidates of an experiment and print the best of each group."""
    texts = _texts(options)
    seeds = tuning_seeds(options)
    if experiment.tuning is None:
        having = ", ".join(one.name for one in EXPERIMENTS.values() if one.tuning is not None)
        raise ConfigError(f"the experiment {experiment.name} has nothing to tune: those that have are {having}")
    setting = setting_of(texts, {experiment.text})
    digest, groups = setting.texts[experiment.text], experiment.tuning(texts.scale)
    tasks = {
        key: Task(key, code_of(experiment, options.how), f"{group}, {name}", arm, seed, experiment.text)
        for group, arms in groups.items()
        for name, arm in arms.items()
        for seed in seeds
        if (key := key_of(arm, seed, digest))
    }
    ResultFolder(options.folder).begin(setting)
    _run(list(tasks.values()), texts, options, [experiment])(say)
    show_tuning(experiment, texts.scale, options.folder, seeds, digest, say)


def tuning_seeds(options: RunOptions) -> range:
    """Seeds that judge nothing: no claim is judged by a seed for which rates were chosen."""
    count = len(check_seeds(1 if options.seeds is None else options.seeds))
    return range(TUNING_SEED, TUNING_SEED + count)


def _texts(options: RunOptions) -> Texts:
    return Texts(options.text, options.domains, scale_of(options.scale))


def _run(tasks: Sequence[Task], texts: Texts, options: RunOptions, experiments: Sequence[Experiment]) -> Run:
    return Run(
        tuple(tasks),
        texts,
        options.folder,
        device_of(options.device),
        seconds=options.seconds,
        processes=options.processes,
        how=options.how,
        save_seconds=options.save_seconds,
        any_code=options.any_code,
        files=tuple(one.file for one in experiments if one.file is not None),
    )


def show_tuning(experiment: Experiment, scale: Scale, out: Path, seeds: range, digest: str, say: Say) -> None:
    """The candidates of each group, the best first, and whether the best one lies at the edge of what was tried."""
    assert experiment.tuning is not None
    results = ResultFolder(out)
    for group, arms in experiment.tuning(scale).items():
        found = {}
        for name, arm in arms.items():
            finished = [one for seed in seeds if (one := results.read(key_of(arm, seed, digest))) is not None]
            if finished:
                found[name] = statistics.mean(one.result.loss for one in finished)
        ordered = sorted(found, key=found.__getitem__)
        say(f"{group}: " + ", ".join(f"{name} {found[name]:.4f}" for name in ordered))
        if ordered and (edges := _edges(arms[ordered[0]], list(arms.values()))):
            say(f"  {ordered[0]} is at the edge of its grid ({', '.join(edges)}): try values beyond it")


_TUNED_NUMBERS: dict[str, Callable[[Arm], float | None]] = {
    "inner lr": lambda arm: arm.inner_config.lr,
    "outer lr": lambda arm: arm.outer_config.lr,
    "outer momentum": lambda arm: arm.outer_config.momentum,
}


def _edges(best: Arm, candidates: Sequence[Arm]) -> list[str]:
    """The numbers of the best candidate that are the lowest or the highest tried, where more than one was."""
    found = []
    for name, number_of in _TUNED_NUMBERS.items():
        tried = sorted({number for arm in candidates if (number := number_of(arm)) is not None})
        own = number_of(best)
        if len(tried) > 1 and own in (tried[0], tried[-1]):
            found.append(f"{name} {own:g}")
    return found


def report(folder: Path, names: Sequence[str], to: Path | None, say: Say) -> None:
    """Write the report of a folder; `names`: of these experiments only, or files of one's own."""
    written = write_report(folder, chosen(names, everything=not names), to)
    for one in written.judgements:
        if one.values:
            reason = f"; {one.reason}" if one.reason else ""
            say(f"{one.verdict:14} {one.claim.text}: {one.measured_text} (published: {one.claim.published}{reason})")
    say(f"written: {written.html}, {written.markdown}")


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
