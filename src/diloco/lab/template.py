"""The file that `diloco lab new NAME` writes."""

TEMPLATE = '''"""NAME: say in one sentence what you want to know.

    diloco lab run NAME.py --scale smoke --out runs/NAME-smoke
    diloco lab run NAME.py --scale cpu --seeds 3 --out runs/NAME
    diloco lab report runs/NAME NAME.py
"""

from diloco.lab.claims import Claim
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


def claims(scale: Scale) -> tuple[Claim, ...]:
    """What you expect, as a number for each seed: 0.01 is a perplexity 1 % higher."""
    del scale
    return (
        Claim("My method beats DiLoCo", "–", lambda m: m.change(MINE, "DiLoCo"), at_most=0.0),
        Claim("It is within 2 % of data parallelism", "–", lambda m: m.change(MINE, "data-parallel"), at_most=0.02),
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
