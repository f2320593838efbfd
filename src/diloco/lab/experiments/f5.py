"""Figure 5 and the non-i.i.d. column of Table 3 of the DiLoCo paper: workers that read different texts."""

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale

IID = "8 workers, i.i.d."
NON_IID = "8 workers, non-i.i.d."
IID_4 = "4 workers, i.i.d."
NON_IID_4 = "4 workers, non-i.i.d."
ONE = "1× baseline"
DROPPED = "8 workers, non-i.i.d., 50 % dropped"


def arms(scale: Scale) -> Arms:
    return {
        NON_IID: scale.diloco(data="shards"),
        IID: scale.diloco(),
        ONE: scale.one_worker(),
        DROPPED: scale.diloco(data="shards", drop=0.5),
        NON_IID_4: scale.diloco(data="shards", workers=4),
        IID_4: scale.diloco(workers=4),
    }


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return (
        PublishedClaim(
            "8 workers with different texts are within 2 % of 8 workers with the same",
            "−0.40 % (15.02 against 15.08)",
            lambda m: m.change(NON_IID, IID),
            at_most=0.02,
            expected=15.02 / 15.08 - 1,
        ),
        PublishedClaim(
            "4 workers with different texts are within 2 % of 4 workers with the same",
            "−0.33 % (15.18 against 15.23)",
            lambda m: m.change(NON_IID_4, IID_4),
            at_most=0.02,
            expected=15.18 / 15.23 - 1,
        ),
        PublishedClaim(
            "8 workers with different texts have a lower perplexity than one worker that reads all",
            "−7.46 % (15.02 against 16.23)",
            lambda m: m.change(NON_IID, ONE),
            at_most=0.0,
            expected=15.02 / 16.23 - 1,
        ),
        PublishedClaim(
            "Figure 8, non-i.i.d.: half of the communication dropped costs at most 3 %",
            "+2.1 %",
            lambda m: m.change(DROPPED, NON_IID),
            at_most=0.03,
            expected=0.021,
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Figure 5: i.i.d. and non-i.i.d.", (IID, NON_IID, IID_4, NON_IID_4)),)


EXPERIMENT = Experiment(
    name="f5",
    title="i.i.d. and non-i.i.d. data",
    source="DiLoCo, Figure 5 and Table 3",
    arms=arms,
    claims=claims,
    figures=figures,
    text="domains",
    published={IID: 15.08, NON_IID: 15.02, IID_4: 15.23, NON_IID_4: 15.18, ONE: 16.23},
    note="The paper's shards are k-means clusters of one web text by the features of a model. Here they are those of "
    "the text given: such clusters too (data.partition = clusters), or whole labels, which are further apart.",
)
