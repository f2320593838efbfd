"""Muon as inner optimizer (MuLoCo), against AdamW, with and without DiLoCo."""

import math
from typing import Any

from diloco.lab.claims import PublishedClaim
from diloco.lab.experiment import Arms, Curves, Experiment, Figure
from diloco.lab.scales import Scale
from diloco.lab.tuning import INNER_LRS, Search

PRETRAINING_LR = 4e-3
ADAMW = "AdamW, DiLoCo"
ADAMW_DP = "AdamW, data-parallel"
MUON = "Muon, DiLoCo"
MUON_DP = "Muon, data-parallel"


def _muon(scale: Scale, lr: float) -> dict[str, Any]:
    """Inner rate and the pre-training that these arms share."""
    inner = {"optimizer": "muon", "lr": lr}
    return {"inner": inner, "pretraining_inner": scale.inner(PRETRAINING_LR, optimizer="muon")}


def arms(scale: Scale) -> Arms:
    return {
        MUON: scale.diloco(**_muon(scale, scale.muon_lr)),
        ADAMW: scale.diloco(),
        MUON_DP: scale.data_parallel(**_muon(scale, scale.muon_data_parallel_lr)),
        ADAMW_DP: scale.data_parallel(),
    }


def claims(scale: Scale) -> tuple[PublishedClaim, ...]:
    del scale
    return (
        PublishedClaim(
            "Muon inside DiLoCo has a lower perplexity than AdamW inside",
            "3.120 against 3.142 nats (k = 1, 150M)",
            lambda m: m.change(MUON, ADAMW),
            at_most=0.0,
            expected=math.expm1(3.120 - 3.142),
        ),
        PublishedClaim(
            "DiLoCo with Muon is within 2 % of data-parallel Muon",
            "3.120 against 3.124 nats (k = 1, 150M)",
            lambda m: m.change(MUON, MUON_DP),
            at_most=0.02,
            expected=math.expm1(3.120 - 3.124),
        ),
    )


def figures(scale: Scale) -> tuple[Figure, ...]:
    del scale
    return (Curves("Muon and AdamW inside"),)


def tuning(scale: Scale) -> list[Search]:
    """DiLoCo's outer rate and momentum stay those that were tuned with AdamW inside."""
    return [
        Search(
            MUON,
            {"lr": INNER_LRS},
            {"lr": scale.muon_lr},
            lambda v: scale.diloco(**_muon(scale, v["lr"])),
            lambda v: {"muon_lr": v["lr"]},
        ),
        Search(
            MUON_DP,
            {"lr": INNER_LRS},
            {"lr": scale.muon_data_parallel_lr},
            lambda v: scale.data_parallel(**_muon(scale, v["lr"])),
            lambda v: {"muon_data_parallel_lr": v["lr"]},
        ),
    ]


EXPERIMENT = Experiment(
    name="muon",
    title="Muon inside",
    source="MuLoCo",
    arms=arms,
    claims=claims,
    figures=figures,
    tuning=tuning,
)
