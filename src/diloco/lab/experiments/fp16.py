"""OpenDiLoCo's ablation: outer gradients averaged in 16 bits; and in fewer."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Experiment, Figure, Sweep
from diloco.lab.scales import Scale

CODECS = ("fp32", "fp16", "bf16", "int8", "int4", "e3m0")
PUBLISHED = {"fp16": "no loss", "e3m0": "no loss (Streaming DiLoCo)"}


def arms(scale: Scale) -> Arms:
    return {codec: scale.diloco(sync={"codec": codec}) for codec in CODECS}


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return tuple(
        PublishedClaim(
            f"{codec} costs no more than 0.5 % of perplexity",
            PUBLISHED.get(codec, "–"),
            lambda m, c=codec: m.change(c, "fp32"),  # type: ignore[misc]
            at_least=-0.005,
            at_most=0.005,
        )
        for codec in CODECS[1:]
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    bits = {"fp32": 32.0, "fp16": 16.0, "int8": 8.0, "int4": 4.0}
    lines = {"fp32, fp16, int8, int4": bits, "bf16": {"bf16": 16.0}, "e3m0": {"e3m0": 4.0}}
    return (Sweep("Outer gradients in 16, 8 and 4 bits", "bits a value", lines, x_log=True),)


EXPERIMENT = Experiment(
    name="fp16",
    title="Outer gradients in 16, 8 and 4 bits",
    source="OpenDiLoCo, fp16 all-reduce; arXiv 2501.18512",
    arms=arms,
    claims=claims,
    figures=figures,
)
