"""Table 3 of the DiLoCo paper: the number of replicas, i.i.d. The non-i.i.d. column is in f5.py, on another text."""

from itertools import pairwise

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure, Sweep
from diloco.lab.fits import Results, doubling_line
from diloco.lab.report.pages import Block
from diloco.lab.scales import Scale

PUBLISHED = {1: 16.23, 4: 15.23, 8: 15.08, 16: 15.02, 64: 14.95}


def _name(k: int) -> str:
    return "1 replica (no outer steps)" if k == 1 else f"{k} replicas"


def _published(fewer: int, more: int) -> str:
    if fewer not in PUBLISHED or more not in PUBLISHED:
        return "–"
    return f"{PUBLISHED[more] / PUBLISHED[fewer] - 1:+.2%}".replace("-", "−")


def _expected(fewer: int, more: int) -> float | None:
    both_published = fewer in PUBLISHED and more in PUBLISHED
    return PUBLISHED[more] / PUBLISHED[fewer] - 1 if both_published else None


def arms(scale: Scale) -> Arms:
    arms_by_name = {_name(k): scale.diloco(workers=k) if k > 1 else scale.one_worker() for k in scale.replicas}
    order = sorted(arms_by_name, key=lambda name: arms_by_name[name].workers != scale.workers)
    return {name: arms_by_name[name] for name in order}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    published_claims = []
    counts = sorted(scale.replicas)
    for fewer, more in pairwise(counts):
        published_claims.append(
            PublishedClaim(
                f"{more} replicas have a lower perplexity than {fewer}",
                _published(fewer, more),
                lambda m, a=more, b=fewer: m.change(_name(a), _name(b)),  # type: ignore[misc]
                at_most=0.0,
                expected=_expected(fewer, more),
            )
        )
    if 16 in counts:
        published_claims.append(
            PublishedClaim(
                "Diminishing returns beyond 8: from 8 to 16 replicas gains less than from 4 to 8",
                "0.40 % against 0.98 %",
                lambda m: m.change(_name(8), _name(4)) - m.change(_name(16), _name(8)),
                at_most=0.0,
                expected=-0.0098 + 0.0040,
            )
        )
    return tuple(published_claims)


def figures(scale: Scale) -> tuple[Figure, ...]:
    places = {_name(k): float(k) for k in scale.replicas}
    return (Sweep("Table 3: replicas", "replicas", {"i.i.d.": places}, x_log=True), Curves("The curves"))


def analysis(scale: Scale, results: Results) -> list[Block]:
    fewest = min(k for k in scale.replicas if k > 1)
    places = {_name(k): (float(k),) for k in scale.replicas if k > 1}
    return doubling_line((f"the replicas, from {fewest} on",), places, results)


EXPERIMENT = Experiment(
    name="t3",
    title="The number of replicas",
    source="DiLoCo, Table 3",
    arms=arms,
    claims=claims,
    figures=figures,
    analysis=analysis,
    published={_name(k): value for k, value in PUBLISHED.items()},
    note="All arms share the inner and outer rates that were tuned at 8 replicas, as in the paper.",
)
