"""One worker of eight that turns its outer gradients around: the plain mean against centred clipping, and its price."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

HOSTILE = (7,)
PLAIN = "mean"
CLIPPED = "clipped"


def _hostile(merge: str) -> str:
    return f"{merge}, one hostile"


def arms(scale: Scale) -> Arms:
    arms_by_name: Arms = {}
    for merge in (PLAIN, CLIPPED):
        sync = {} if merge == PLAIN else {"merge": merge}
        arms_by_name[_hostile(merge)] = scale.diloco(hostile=HOSTILE, sync=sync)
        arms_by_name[merge] = scale.diloco(sync=sync)
    return arms_by_name


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return (
        PublishedClaim(
            "Without an attacker clipping costs at most 0.3 %",
            "none to 0.3 %",
            lambda m: m.change(CLIPPED, PLAIN),
            at_most=0.003,
        ),
        PublishedClaim(
            "With one hostile worker of eight, clipping is better than the plain mean",
            "better",
            lambda m: m.change(_hostile(CLIPPED), _hostile(PLAIN)),
            at_most=0.0,
        ),
        PublishedClaim(
            "With clipping, one hostile worker of eight costs at most 2 %",
            "not published",
            lambda m: m.change(_hostile(CLIPPED), PLAIN),
            at_most=0.02,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("One hostile worker of eight"),)


EXPERIMENT = Experiment(
    name="hostile",
    title="A hostile worker",
    source="centred clipping, arXiv 2012.10333",
    arms=arms,
    claims=claims,
    figures=figures,
    note="The centre is the median of the round, and the radius the median distance from it.",
)
