"""Every value with which a run trains: the options, and what was decided for those that were left open.

They are in the event `worker_started`, in summary.json and in the model card. config.toml is the run file of a resume,
in which an open option stays open: there the decided values are a comment at the end.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diloco.atomic_files import write_file
from diloco.core.outer_optimizers import used_numbers
from diloco.data.corpus import Corpus
from diloco.models.base import LanguageModel
from diloco.outer.loop import OuterLoop
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.inner import MUON_MOMENTUM
from diloco.training.modes import Mode
from diloco.training.records.run_folder import RUN_FILE
from diloco.training.records.summary import versions


def resolved_values(
    config: RunConfig, *, mode: Mode, model: LanguageModel, corpus: Corpus, device: str, precision: str, compiled: bool
) -> dict[str, Any]:
    """The values by dotted key; None where there is nothing, as for a gradient norm that is not clipped."""
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
    """Into config.toml, as a comment: the values that the options alone do not say."""
    given = config.values()
    decided = {key: value for key, value in resolved.items() if key not in given or given[key] != value}
    lines = [f"#   {key} = {value}" for key, value in decided.items()]
    text = "\n".join(["", "# Decided when training started:", *lines, ""])
    write_file(folder / RUN_FILE, to_toml(config) + text)
