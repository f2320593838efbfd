"""What a missed round costs, and a law for it: dropped contributions by outer momentum, rule and number of workers.

No paper has it. The DiLoCo paper drops outer gradients at one momentum with 8 workers (Figure 8) and counts every
contribution that arrives alike. Here a contribution whose worker missed rounds before counts by one of four rules
(`Arm.missed`), and the cost, the loss above that of the same arm without drops, is fitted by

    cost = a · p^b · k^c · (1 − momentum)^(−d)

with p the part of contributions that is dropped and k the workers. The second question is whether one can see early
which momentum is best: from the mean cosine between the workers' outer gradients in the first ten rounds.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple, get_args

from diloco.lab.arm import Arm, ArmResult, MissedRule
from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Experiment, Figure, Sweep
from diloco.lab.fits import PowerLaw, Results, fit_power_law, left_out_errors, lowest_of_parabola
from diloco.lab.report.pages import Block, Grid, Paragraph
from diloco.lab.results import FIRST_ROUNDS
from diloco.lab.scales import Scale

RULES: tuple[MissedRule, ...] = get_args(MissedRule)


class SweptValues(NamedTuple):
    """The values that are combined at a scale, each with each."""

    workers: tuple[int, ...]
    dropped: tuple[float, ...]
    """0 among them: what the cost is measured from."""
    momenta: tuple[float, ...]
    rules: tuple[MissedRule, ...]


def plan(scale: Scale) -> SweptValues:
    """Return all values for the scales of one size, and fewer for the larger ones, which check the law."""
    if scale.smoke:
        return SweptValues((2, 4), (0.0, 0.2, 0.5), (0.5, 0.7, 0.9), RULES)
    if scale.name in ("4m", "14m"):
        return SweptValues((8,), (0.0, 0.3, 0.5), (0.5, 0.8, 0.9), ("token_weighted", "uniform"))
    return SweptValues((4, 8, 16), (0.0, 0.1, 0.3, 0.5), (0.5, 0.7, 0.8, 0.9), RULES)


def _name(k: int, dropped: float, momentum: float, rule: MissedRule) -> str:
    """Without drops the rule has no effect, and the arm is one for all rules."""
    what_is_missed = f"{dropped:.0%} dropped, {rule.replace('_', '-')}" if dropped else "none dropped"
    return f"k = {k}, momentum {momentum:g}, {what_is_missed}"


def _arm(scale: Scale, k: int, dropped: float, momentum: float, rule: MissedRule) -> Arm:
    rule_field = {"missed": rule} if dropped else {}
    return scale.diloco(workers=k, drop=dropped, outer={"momentum": momentum}, **rule_field)


def arms(scale: Scale) -> Arms:
    arms_by_name: Arms = {}
    for k in sorted(plan(scale).workers, key=lambda k: k != scale.workers):
        for dropped in plan(scale).dropped:
            for momentum in plan(scale).momenta:
                for rule in plan(scale).rules:
                    arms_by_name[_name(k, dropped, momentum, rule)] = _arm(scale, k, dropped, momentum, rule)
    return arms_by_name


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    values = plan(scale)
    k = scale.workers if scale.workers in values.workers else max(values.workers)
    most_dropped = max(values.dropped)
    low = min(values.momenta)
    high = max(values.momenta)
    middle = values.momenta[-2]
    published_claims = [
        PublishedClaim(
            f"With {most_dropped:.0%} dropped, k = {k} and momentum {middle:g}, missed rounds cost at most 3 % of "
            "perplexity",
            "+2.1 % (non-i.i.d., momentum 0.9, uniform)",
            lambda m: m.change(
                _name(k, most_dropped, middle, "token_weighted"), _name(k, 0.0, middle, "token_weighted")
            ),
            at_most=0.03,
            expected=0.021,
        ),
        PublishedClaim(
            f"Weights by tokens are better than uniform ones ({most_dropped:.0%} dropped, k = {k}, momentum {high:g})",
            "–",
            lambda m: m.change(_name(k, most_dropped, high, "token_weighted"), _name(k, most_dropped, high, "uniform")),
            at_most=0.0,
        ),
        PublishedClaim(
            f"Less momentum makes missed rounds cheaper ({low:g} against {high:g}, {most_dropped:.0%} dropped, "
            f"k = {k})",
            "–",
            lambda m: (
                m.change(_name(k, most_dropped, low, "token_weighted"), _name(k, 0.0, low, "token_weighted"))
                - m.change(_name(k, most_dropped, high, "token_weighted"), _name(k, 0.0, high, "token_weighted"))
            ),
            at_most=0.0,
        ),
    ]
    if "discarded" in values.rules:
        published_claims.append(
            PublishedClaim(
                f"Work that missed a round is worth keeping ({most_dropped:.0%} dropped, k = {k}, momentum {middle:g})",
                "–",
                lambda m: m.change(
                    _name(k, most_dropped, middle, "token_weighted"), _name(k, most_dropped, middle, "discarded")
                ),
                at_most=0.0,
            )
        )
    return tuple(published_claims)


def figures(scale: Scale) -> tuple[Figure, ...]:
    values = plan(scale)
    k = scale.workers if scale.workers in values.workers else max(values.workers)
    most_dropped = max(values.dropped)
    by_rule: dict[str, dict[str, float]] = {
        rule.replace("_", "-"): {_name(k, most_dropped, momentum, rule): momentum for momentum in values.momenta}
        for rule in values.rules
    }
    by_rule["none dropped"] = {_name(k, 0.0, momentum, values.rules[0]): momentum for momentum in values.momenta}
    middle = values.momenta[-2]
    by_workers = {
        f"k = {count}": {_name(count, dropped, middle, "token_weighted"): 100 * dropped for dropped in values.dropped}
        for count in values.workers
    }
    return (
        Sweep(f"{most_dropped:.0%} dropped, k = {k}", "outer momentum", by_rule),
        Sweep(f"Momentum {middle:g}, token-weighted", "% of contributions dropped", by_workers),
    )


# The law


class Cost(NamedTuple):
    """The cost of drops for one arm with one seed: its loss above that of the same arm and seed without drops."""

    k: int
    dropped: float
    momentum: float
    nats: float

    @property
    def place(self) -> tuple[float, float, float]:
        """Where the law has this cost: p, k, 1 / (1 − momentum)."""
        return self.dropped, float(self.k), 1 / (1 - self.momentum)


def costs(scale: Scale, results: Results, rule: MissedRule) -> list[Cost]:
    """Compute the costs of all finished arms of a rule; runs that diverged are left out."""
    measured: list[Cost] = []
    values = plan(scale)
    for k in values.workers:
        for momentum in values.momenta:
            undropped_loss = {result.seed: result.loss for result in results.get(_name(k, 0.0, momentum, rule), ())}
            for dropped in values.dropped:
                finished = results.get(_name(k, dropped, momentum, rule), ()) if dropped else ()
                pairs = [
                    (result.loss, undropped_loss[result.seed]) for result in finished if result.seed in undropped_loss
                ]
                measured += [Cost(k, dropped, momentum, loss - undropped) for loss, undropped in pairs]
    return [cost for cost in measured if math.isfinite(cost.nats)]


def analysis(scale: Scale, results: Results) -> list[Block]:
    return [*_law(scale, results), *_best_momentum(scale, results)]


def _law(scale: Scale, results: Results) -> list[Block]:
    rows = []
    for rule in plan(scale).rules:
        measured = costs(scale, results, rule)
        law = fit_power_law([cost.place for cost in measured], [cost.nats for cost in measured]) if measured else None
        if law is not None:
            rows.append((rule.replace("_", "-"), *_law_row(law, measured)))
    if not rows:
        return [Paragraph("The law is not fitted: it needs several numbers of workers, parts dropped and momenta.")]
    heads = ("rule", "a, nats", "b (p)", "c (k)", "d (1/(1 − momentum))", "runs", "explained", "error", "at unseen k")
    return [
        Paragraph(
            "The cost of missed rounds in nats, above the same arm without drops: a · p^b · k^c · (1 − momentum)^(−d), "
            "± two standard errors. Error: root mean square of what the law leaves; at unseen k: the same at the "
            "largest number of workers, by the law fitted without it."
        ),
        Grid(heads, rows),
    ]


def _law_row(law: PowerLaw, measured: Sequence[Cost]) -> tuple[str, ...]:
    numbers = (law.factor, *law.exponents)
    cells = [f"{number:.3g} ± {error:.2g}" for number, error in zip(numbers, law.errors, strict=True)]
    return (*cells, str(len(measured)), f"{law.explained:.0%}", f"{law.error:.4f}", _error_at_unseen_k(measured))


def _error_at_unseen_k(measured: Sequence[Cost]) -> str:
    largest_k = max(cost.k for cost in measured)
    known_k = [cost for cost in measured if cost.k < largest_k]
    largest = [cost for cost in measured if cost.k == largest_k]
    law = fit_power_law([cost.place for cost in known_k], [cost.nats for cost in known_k]) if known_k else None
    if law is None:
        return "–"
    predicted = law.predict([cost.place for cost in largest])
    mean_square = statistics.mean((cost.nats - float(p)) ** 2 for cost, p in zip(largest, predicted, strict=True))
    return f"{math.sqrt(mean_square):.4f}"


# The best momentum, and the cosine of the first rounds


def _best_momentum(scale: Scale, results: Results) -> list[Block]:
    values = plan(scale)
    rows = []
    cosines = []
    best = []
    for k in values.workers:
        for dropped in values.dropped:
            for rule in values.rules if dropped else values.rules[:1]:
                losses = _losses(results, k, dropped, rule, values.momenta)
                cosine = _first_cosine(results.get(_name(k, dropped, values.momenta[-2], rule), ()))
                if len(losses) < 3 or cosine is None:
                    continue
                momentum = 1 - 1 / math.exp(
                    lowest_of_parabola([-math.log(1 - value) for value in losses], list(losses.values()))
                )
                cosines.append(cosine)
                best.append(momentum)
                losses_text = ", ".join(f"{value:g}: {loss:.4f}" for value, loss in losses.items())
                described = f"{dropped:.0%} dropped, {rule.replace('_', '-')}" if dropped else "none dropped"
                rows.append((str(k), described, losses_text, f"{momentum:.2f}", f"{cosine:.3f}"))
    if not rows:
        return []
    heads = ("k", "missed rounds", "loss by momentum", "best momentum", f"cosine, first {FIRST_ROUNDS} rounds")
    return [Grid(heads, rows), Paragraph(_prediction(cosines, best))]


def _losses(results: Results, k: int, dropped: float, rule: MissedRule, momenta: Sequence[float]) -> dict[float, float]:
    """Compute the mean loss over the seeds for each momentum that was run and did not diverge."""
    means = {}
    for momentum in momenta:
        losses = [result.loss for result in results.get(_name(k, dropped, momentum, rule), ())]
        if losses and all(map(math.isfinite, losses)):
            means[momentum] = statistics.mean(losses)
    return means


def _first_cosine(results: Sequence[ArmResult]) -> float | None:
    """Compute the mean cosine between outer gradients in the first rounds, over the seeds."""
    rows = [row.cosine for result in results for row in result.statistics[:FIRST_ROUNDS] if row.cosine is not None]
    return statistics.mean(rows) if rows else None


def _prediction(cosines: Sequence[float], best: Sequence[float]) -> str:
    if len(cosines) < 4 or len(set(best)) < 2 or len(set(cosines)) < 2:
        return "Whether the first rounds predict the best momentum cannot be said of so few settings."
    from scipy.stats import spearmanr

    rank, chance = spearmanr(cosines, best)
    by_line, by_mean = left_out_errors(cosines, best)
    verdict = "predicts" if by_line < 0.8 * by_mean else "does not predict"
    return (
        f"The cosine of the first {FIRST_ROUNDS} rounds {verdict} the best momentum: over {len(best)} settings their "
        f"rank correlation is {rank:+.2f} (p = {chance:.2g}), and a line through all other settings misses the best "
        f"momentum by {by_line:.3f}, their mean by {by_mean:.3f} (root mean square)."
    )


EXPERIMENT = Experiment(
    name="missed_rounds",
    title="What a missed round costs",
    source="this project; DiLoCo, Figure 8",
    arms=arms,
    claims=claims,
    figures=figures,
    analysis=analysis,
    note="All workers read the same text. The outer rate is the same for all momenta, so that more momentum is also a "
    "larger outer step. A worker that is dropped takes the outer step on its anchor, and trains on from its own "
    "parameters unless the rule is discarded.",
)
