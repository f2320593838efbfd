"""The fields of the events of one worker's start, rounds and end.

At the start these are also all values with which the run trains: the options, and what was decided for those that were
left open. They are in summary.json and in the model card too. config.toml is the run file of a resume, in which an open
option stays open: there the decided values are a comment at the end.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from diloco.atomic_files import write_file
from diloco.core.outer_optimizers import used_numbers
from diloco.data.corpus import Corpus
from diloco.engines.base import Connection
from diloco.engines.rounds import Member, Report, RoundResult
from diloco.history.events import ROUND_STATISTICS, MemberReport, RoundEndedEvent, RoundMember
from diloco.history.rounds import REPORTED_PHASES
from diloco.models.base import LanguageModel
from diloco.outer.loop import OuterLoop
from diloco.outer.rounds import RoundEvent
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.inner import MUON_MOMENTUM
from diloco.training.modes import Mode
from diloco.training.records.agreement import Agreement
from diloco.training.records.run_folder import RUN_FILE
from diloco.training.records.summary import versions


def started_fields(config: RunConfig, engine: Connection, model: LanguageModel, corpus: Corpus) -> dict[str, Any]:
    """Return the fields of a WorkerStartedEvent, but for the device and the precision."""
    return {
        "workers": engine.workers,
        "ranks": engine.ranks.count,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "threads": torch.get_num_threads(),
        "tokens_per_step": config.tokens_per_step,
        "unigram_perplexity": corpus.unigram_perplexity,
    }


def resolved_values(
    config: RunConfig, *, mode: Mode, model: LanguageModel, corpus: Corpus, device: str, precision: str, compiled: bool
) -> dict[str, Any]:
    """Return all values with which a run trains, by dotted key; None where there is nothing, as for a gradient norm
    that is not clipped."""
    values: dict[str, Any] = config.values()
    values |= {
        "device": device,
        "threads": torch.get_num_threads(),
        "training.eval_interval": config.eval_interval,
        "checkpoint.interval": config.checkpoint_interval,
        "compute.precision": precision,
        "compute.compile": compiled,
        "data.vocab_size": corpus.vocab_size,
        "text.digest": corpus.digest,
        "text.shards": corpus.shards,
        "text.train_tokens": corpus.train_tokens,
        "model.description": model.description,
        "model.trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "model.parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_step": config.tokens_per_step,
    }
    if config.inner.optimizer == "muon" and config.inner.momentum is None:
        values["inner.momentum"] = MUON_MOMENTUM
    if isinstance(mode.averager, OuterLoop):
        values |= {f"outer.{name}": number for name, number in used_numbers(config.outer).items()}
        decay = config.sync.feedback_decay
        values |= {"sync.error_feedback": decay is not None, "sync.error_decay": decay}
        values["model.fragments"] = mode.averager.state.num_fragments
    return values | {f"version.{name}": version for name, version in versions().items()}


def write_resolved(folder: Path, config: RunConfig, resolved: Mapping[str, Any]) -> None:
    """Write the values that the options alone do not say into config.toml, as a comment."""
    given = config.values()
    decided = {key: value for key, value in resolved.items() if key not in given or given[key] != value}
    lines = [f"#   {key} = {value}" for key, value in decided.items()]
    text = "\n".join(["", "# Decided when training started:", *lines, ""])
    write_file(folder / RUN_FILE, to_toml(config) + text)


def round_members(members: Iterable[Member]) -> list[RoundMember]:
    """Return the members as events have them: all but their notes, which are for the other workers only."""
    return [
        RoundMember(
            worker=member.worker,
            anchor_digest=member.anchor_digest,
            weight=member.weight,
            norm=member.norm,
            report=_member_report(member.report),
        )
        for member in members
    ]


def _member_report(report: Report) -> MemberReport:
    values = asdict(report)
    known = {field.name: values.pop(field.name) for field in fields(MemberReport) if field.name in values}
    return MemberReport(**known, extra=values)


def round_ended(event: RoundEvent, agreement: Agreement) -> RoundEndedEvent:
    """Return a round as the log has it."""
    with_others = agreement.compare(event.result)
    return RoundEndedEvent(
        sequence=event.key.sequence,
        fragment=event.key.fragment,
        step=event.inner_step,
        norm=event.norm,
        failure=event.failure,
        dropped=event.dropped,
        cosines=event.cosines(),
        agreement={str(worker): cosine for worker, cosine in with_others.items()},
        disagreeing=agreement.disagreeing,
        **{name: getattr(event, name) for name in ROUND_STATISTICS},
        **event.phase_seconds(),
        **({} if event.result is None else _result_fields(event.result)),
    )


def _result_fields(result: RoundResult) -> dict[str, Any]:
    return {
        "contributors": result.contributors,
        "refused": result.refused,
        "merge": result.merge,
        "clipped": result.clipped,
        "replaced": result.replaced,
        "bytes_sent": result.bytes_sent,
        "members": round_members(result.members),
        "roster": result.roster,
        "signatures": result.signatures,
        "mean_digest": result.mean_digest or None,
    }


def reported_round(event: RoundEvent) -> tuple[float, ...]:
    """Return what a worker reports to the others of a round that has ended for it: `Report.last_round_seconds`."""
    seconds = event.phase_seconds()
    known = (seconds[f"{name}_seconds"] for name in REPORTED_PHASES)
    return (float(event.key.sequence), *(math.nan if value is None else round(value, 4) for value in known))


def end_fields(mode: Mode, steps: int) -> dict[str, Any]:
    """Return the fields of a WorkerEndedEvent, as far as the mode knows them. `steps` are those of the whole run."""
    averager = mode.averager
    position = averager.inner_steps if mode.ended_at is None else mode.ended_at
    return {
        "inner_steps": position,
        "stopped_early": position < steps,
        "rounds": averager.rounds,
        "rounds_failed": averager.counters.rounds_failed,
        "rounds_dropped": averager.counters.rounds_dropped,
        "contributions_refused": averager.counters.contributions_refused,
        "skipped_steps": mode.skipped_steps,
        "bytes_sent": averager.counters.bytes_sent,
        "sync_seconds": averager.counters.sync_seconds,
        "anchor_digest": mode.anchor_digest(),
        "confirmed": round_members(averager.confirmed) if isinstance(averager, OuterLoop) else [],
    }
