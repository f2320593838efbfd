"""The fields of the events of one worker's start, rounds and end."""

import math
from dataclasses import asdict
from typing import Any

import torch

from diloco.data.corpus import Corpus
from diloco.engines.base import Connection
from diloco.engines.rounds import RoundPhases
from diloco.history.waterfall import TOLD
from diloco.models.base import LanguageModel
from diloco.outer.loop import OuterLoop
from diloco.outer.rounds import RoundEvent
from diloco.training.config.run import RunConfig
from diloco.training.modes import Mode
from diloco.training.records.agreement import Agreement


def started_fields(config: RunConfig, engine: Connection, model: LanguageModel, corpus: Corpus) -> dict[str, Any]:
    """Of `worker_started`, but for the device and the precision."""
    return {
        "workers": engine.workers,
        "ranks": engine.ranks.count,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "threads": torch.get_num_threads(),
        "tokens_per_step": config.tokens_per_step,
        "unigram_perplexity": corpus.unigram_perplexity,
    }


def round_fields(event: RoundEvent, agreement: Agreement) -> dict[str, Any]:
    """Of `round`."""
    result = event.result
    with_others = agreement.hear(result)
    phases = RoundPhases() if result is None else result.phases
    return {
        "sequence": event.key.sequence,
        "fragment": event.key.fragment,
        "step": event.inner_step,
        "norm": event.norm,
        "mean_norm": event.mean_norm,
        "codec_error": event.codec_error,
        "similarity": event.similarity,
        "cosines": event.cosines(),
        "agreement": {str(worker): cosine for worker, cosine in with_others.items()},
        "disagreeing": agreement.named,
        **asdict(event.times),
        **asdict(phases),
        "failure": event.failure,
        "dropped": event.dropped,
        "seconds": None if result is None else result.seconds,
        "contributors": [] if result is None else list(result.contributors),
        "refused": {} if result is None else dict(result.refused),
        "merge": None if result is None else result.merge,
        "clipped": {} if result is None else dict(result.clipped),
        "replaced": {} if result is None else {str(worker): share for worker, share in result.replaced.items()},
        "bytes_sent": 0 if result is None else result.bytes_sent,
        "members": [] if result is None else [member.as_json() for member in result.members],
        "roster": [] if result is None else list(result.roster),
        "signatures": 0 if result is None else result.signatures,
        "mean_digest": None if result is None else result.mean_digest or None,
    }


def told_round(event: RoundEvent) -> tuple[float, ...]:
    """What a worker tells the others of a round that has ended for it: `Report.last_round_seconds`."""
    phases = RoundPhases() if event.result is None else event.result.phases
    seconds = asdict(event.times) | asdict(phases)
    known = (seconds[f"{name}_seconds"] for name in TOLD)
    return (float(event.key.sequence), *(math.nan if one is None else round(one, 4) for one in known))


def end_fields(mode: Mode, steps: int) -> dict[str, Any]:
    """Of `worker_finished` and `worker_failed`, as far as the mode knows them. `steps`: of the whole run."""
    averager = mode.averager
    position = averager.inner_steps if mode.ended_at is None else mode.ended_at
    return {
        "inner_steps": position,
        "stopped_early": position < steps,
        "rounds": averager.rounds,
        "rounds_failed": averager.rounds_failed,
        "rounds_dropped": averager.rounds_dropped if isinstance(averager, OuterLoop) else 0,
        "contributions_refused": averager.contributions_refused,
        "skipped_steps": mode.skipped_steps,
        "bytes_sent": averager.bytes_sent,
        "sync_seconds": averager.sync_seconds,
        "anchor_digest": mode.anchor_digest(),
        "confirmed": [member.as_json() for member in averager.confirmed] if isinstance(averager, OuterLoop) else [],
    }
