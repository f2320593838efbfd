"""Streaming DiLoCo and eager updates: fragments, overlap, 4 bits, one outer step of delay."""

import math

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.experiments import eager
from diloco.lab.scales import Scale

PLAIN = "DiLoCo"
STREAMING = "streaming"
OVERLAP = "streaming + overlap"
BITS = "streaming + overlap + 4-bit"
MANY = "streaming, a fragment a block"
IN_ORDER = "streaming, neighbouring blocks together"
FOUR = "4-bit"
EAGER = "eager"
DELAYED = "delayed"
LARGEST_COST = {STREAMING: 0.01, MANY: 0.01, IN_ORDER: 0.01, OVERLAP: 0.02, BITS: 0.02, FOUR: 0.01, EAGER: 0.03}
PUBLISHED_LOSS = {PLAIN: 2.67, OVERLAP: 2.67, EAGER: 2.69, DELAYED: 3.01}
"""At 500M (arXiv 2502.12996), in nats."""


def arms(scale: Scale) -> Arms:
    streaming = {"fragments": 2}
    overlap = streaming | {"overlap_steps": min(5, max(1, scale.H // 5)), "mixing": 0.5}
    return {
        PLAIN: scale.diloco(),
        EAGER: eager.tuned(scale, "eager"),
        BITS: scale.diloco(sync=overlap | {"codec": "e3m0"}),
        STREAMING: scale.diloco(sync=streaming),
        MANY: scale.diloco(sync={"fragments": min(4, scale.model["num_layers"])}),
        IN_ORDER: scale.diloco(sync={"fragments": 2, "fragment_order": "sequential"}),
        FOUR: scale.diloco(sync={"codec": "e3m0"}),
        OVERLAP: scale.diloco(sync=overlap),
        DELAYED: eager.tuned(scale, "delayed"),
    }


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    cost_claims = []
    for name, limit in LARGEST_COST.items():
        loss = PUBLISHED_LOSS.get(name)
        cost_claims.append(
            PublishedClaim(
                f"{name} costs at most {limit:.0%} of perplexity over DiLoCo",
                "as good" if loss is None else f"+{loss - PUBLISHED_LOSS[PLAIN]:.2f} nats",
                lambda m, n=name: m.change(n, PLAIN),  # type: ignore[misc]
                at_most=limit,
                expected=None if loss is None else math.expm1(loss - PUBLISHED_LOSS[PLAIN]),
            )
        )
    eager_claim = PublishedClaim(
        "Eager updates are better than naive delay",
        "−0.32 nats",
        lambda m: m.change(EAGER, DELAYED),
        at_most=0.0,
        expected=math.expm1(-0.32),
    )
    return (*cost_claims, eager_claim)


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (
        Curves("Fragments, overlap and 4 bits", (PLAIN, STREAMING, MANY, IN_ORDER, OVERLAP, BITS, FOUR)),
        Curves("One outer step of delay", (PLAIN, EAGER, DELAYED)),
    )


EXPERIMENT = Experiment(
    name="streaming",
    title="Streaming, overlap, 4 bits, eager updates",
    source="arXiv 2501.18512 and 2502.12996",
    arms=arms,
    claims=claims,
    figures=figures,
    note="Published losses are at 500M parameters. Eager and delayed updates have the outer rate and momentum "
    "that `diloco lab tune eager` finds for eager ones.",
)
