"""The results of a folder, experiment by experiment: means and spreads over the seeds, and verdicts."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from diloco.lab.arm import ArmResult
from diloco.lab.claims import Judgement, SeedResults, half_width, judge
from diloco.lab.experiment import Experiment
from diloco.lab.experiments import regime, t2
from diloco.lab.results import TUNING_SEED, FinishedArm, ResultFolder, key_of
from diloco.lab.scales import Scale


@final
@dataclass(frozen=True)
class ArmSummary:
    """One arm over its seeds."""

    name: str
    by_seed: Mapping[int, FinishedArm]

    @property
    def results(self) -> list[ArmResult]:
        return [self.by_seed[seed].result for seed in sorted(self.by_seed)]

    @property
    def perplexity(self) -> float:
        return statistics.mean(result.perplexity for result in self.results)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds."""
        values = [result.perplexity for result in self.results]
        return statistics.stdev(values) if len(values) > 1 else None

    def at(self, seeds: Collection[int]) -> "ArmSummary":
        """Return the arm with some of its seeds."""
        return ArmSummary(self.name, {seed: self.by_seed[seed] for seed in seeds})

    def change_against(self, reference: "ArmSummary") -> tuple[float, float]:
        """Return the mean of the relative change of perplexity, seed by seed, and half of its 95 % interval.

        Without a common seed the mean is nan; with one the interval is infinite.
        """
        seeds = sorted(self.by_seed.keys() & reference.by_seed.keys())
        values = [math.expm1(self.by_seed[s].result.loss - reference.by_seed[s].result.loss) for s in seeds]
        return (statistics.mean(values), half_width(values)) if values else (math.nan, math.inf)

    def curve(self) -> list[tuple[int, float, float, float]]:
        """(step, mean, lowest, highest perplexity) at the steps that all seeds have."""
        by_seed = [dict(result.curve) for result in self.results]
        steps = sorted(set.intersection(*(set(curve) for curve in by_seed))) if by_seed else []
        rows = [(step, [math.exp(min(50.0, curve[step])) for curve in by_seed]) for step in steps]
        return [(step, statistics.mean(values), min(values), max(values)) for step, values in rows]

    def similarity(self) -> list[tuple[int, float, float]]:
        """(step, mean cosine, its standard deviation over the pairs) over the seeds."""
        rows: dict[int, list[tuple[float, float]]] = {}
        for result in self.results:
            for row in result.statistics:
                if row.cosine is not None:
                    rows.setdefault(row.step, []).append((row.cosine, row.cosine_spread or 0.0))
        return [
            (step, statistics.mean(c for c, _ in pairs), statistics.mean(s for _, s in pairs))
            for step, pairs in sorted(rows.items())
        ]


@final
@dataclass(frozen=True)
class Summary:
    """An experiment, its arms with at least one seed, and the verdicts on its claims."""

    experiment: Experiment
    arms: tuple[ArmSummary, ...]
    missing: tuple[str, ...]
    """Arms without a result."""
    judgements: tuple[Judgement, ...]

    def arm(self, name: str) -> ArmSummary | None:
        return next((arm for arm in self.arms if arm.name == name), None)

    def at_common_seeds(self) -> "Summary":
        """Return the arms with the seeds that all of them have; this summary itself if there are none.

        Perplexities of different seeds cannot be compared: one whose beginning is worse is worse in every arm.
        """
        seeds = set.intersection(*(set(arm.by_seed) for arm in self.arms)) if self.arms else set()
        return replace(self, arms=tuple(arm.at(seeds) for arm in self.arms)) if seeds else self


@final
@dataclass(frozen=True)
class Window:
    """The possible gain over one worker alone, seed by seed: its loss, and that of a better reference."""

    one_worker: Mapping[int, float]
    reference: Mapping[int, float]

    def shares_kept(self, arm: ArmSummary) -> list[float]:
        """Return the share of each seed: 0 at the loss of one worker, 1 at that of the reference."""
        shares = []
        for seed in sorted(self.one_worker.keys() & self.reference.keys() & arm.by_seed.keys()):
            window = self.one_worker[seed] - self.reference[seed]
            if window:
                shares.append((self.one_worker[seed] - arm.by_seed[seed].result.loss) / window)
        return shares


def windows_of(baselines: Summary | None) -> dict[str, Window]:
    """Return two windows by their titles: from one worker to data parallelism, and from one worker to DiLoCo.

    `baselines`: the summary of t2's arms. A window without a common seed of its two arms is left out.
    """
    losses: dict[str, dict[int, float]] = {}
    for name in (t2.ONE, t2.BATCH, t2.DILOCO):
        arm = baselines.arm(name) if baselines is not None else None
        losses[name] = {} if arm is None else {seed: finished.result.loss for seed, finished in arm.by_seed.items()}
    references = {"window kept": t2.BATCH, "gain kept": t2.DILOCO}
    return {
        title: Window(losses[t2.ONE], losses[name])
        for title, name in references.items()
        if losses[t2.ONE].keys() & losses[name].keys()
    }


def summarise(experiment: Experiment, scale: Scale, folder: ResultFolder, digest: str) -> Summary:
    """Summarise what the folder has of an experiment."""
    seeds = [seed for seed in folder.seeds() if seed < TUNING_SEED]
    summaries = []
    for name, arm in experiment.arms(scale).items():
        by_seed = {seed: finished for seed in seeds if (finished := folder.read(key_of(arm, seed, digest))) is not None}
        summaries.append(ArmSummary(name, by_seed))
    arms = tuple(summary for summary in summaries if summary.by_seed)
    missing = tuple(summary.name for summary in summaries if not summary.by_seed)
    measured = [_measured(arms, seed) for seed in seeds]
    judgements = tuple(judge(claim, measured, smoke=scale.smoke) for claim in experiment.claims(scale))
    return Summary(experiment, arms, missing, judgements)


def _measured(arms: Sequence[ArmSummary], seed: int) -> SeedResults:
    results = {arm.name: arm.by_seed[seed].result for arm in arms if seed in arm.by_seed}
    return SeedResults(
        {name: result.loss for name, result in results.items()},
        {name: _figures(result) for name, result in results.items()},
    )


def _figures(result: ArmResult) -> dict[str, float]:
    """Return the numbers that claims may use besides the loss: means over the second half of the rounds."""
    rounds = result.statistics[len(result.statistics) // 2 :]
    figures = {"bytes": result.bytes_sent_per_worker, "simulated_seconds": result.simulated_seconds}
    cosines = [row.cosine for row in rounds if row.cosine is not None]
    if cosines:
        figures["cosine"] = statistics.mean(cosines)
    norms = [row.mean_norm for row in rounds if row.mean_norm is not None]
    if norms:
        figures["mean_norm"] = statistics.mean(norms)
    return figures


def regime_check(summary: Summary | None) -> str:
    """Say how far apart one worker and eight times the batch are, in the seeds that both have.

    `summary` is that of t2's arms.
    """
    one_worker = summary.arm(t2.ONE) if summary is not None else None
    batch = summary.arm(t2.BATCH) if summary is not None else None
    seeds = one_worker.by_seed.keys() & batch.by_seed.keys() if one_worker is not None and batch is not None else set()
    if one_worker is None or batch is None or not seeds:
        return (
            "The baselines with one and with eight times the batch (t2) have not been run: the regime is not checked."
        )
    one_worker, batch = one_worker.at(seeds), batch.at(seeds)
    gap = one_worker.perplexity / batch.perplexity - 1
    least, most = regime.WINDOW
    verdict = "within" if least <= gap <= most else "NOT within"
    return (
        f"One worker has a perplexity of {one_worker.perplexity:.2f}, eight times the batch {batch.perplexity:.2f}: "
        f"{gap:+.1%}, {verdict} the {least:.0%} to {most:.0%} that this laboratory asks for (the paper: +6.1 %)."
    )
