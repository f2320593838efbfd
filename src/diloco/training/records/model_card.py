"""A model card: what was trained, on what, how and how well, from a run's config.toml and summary.json alone.

It says nothing that these do not say: no licence, no language, no intended use. Of a local path it has only the last
part, since a card is published.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.core.config import OUTER_NUMBERS
from diloco.models.pretrained import is_local, is_pretrained, short_name
from diloco.training.records.summary import Summary

_MACHINE_OPTIONS = frozenset({"out", "host", "port", "announce", "sinks", "dashboard", "data.cache_dir", "threads"})
_PATHS = ("model.name", "data.source", "data.tokenizer", "data.feature_model")


def model_card(
    summary: Summary,
    options: Mapping[str, Any],
    *,
    dtype: str,
    checkpoint_of: int | None = None,
    adapter: bool = False,
) -> str:
    """Write the README.md of an exported model, or with `adapter` of its adapters alone. `options` are the dotted keys
    of the run's config.toml. `checkpoint_of`: the inner steps of the whole run, for the weights of a checkpoint."""
    rows = [*_what(summary, options), *_how(summary, options), *_result(summary), ("weights", dtype)]
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows if value)
    return f"""{_front_matter(options)}
# {short_name(options["model.name"])}, trained with {_method(summary)}

{_status(summary) if checkpoint_of is None else _checkpoint(summary, checkpoint_of)}

| | |
| --- | --- |
{table}

```python
{_ADAPTER_USE if adapter else _USE}
```
{_every_value(summary)}"""


_USE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""
_ADAPTER_USE = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("THE MODEL IT STARTED FROM"), "FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""


def _front_matter(options: Mapping[str, Any]) -> str:
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- diloco"]
    model = options["model.name"]
    if is_pretrained(model) and not is_local(model):
        lines.append(f"base_model: {model.removeprefix('hf:')}")
    return "\n".join([*lines, "---", ""])


def _method(summary: Summary) -> str:
    return "DiLoCo" if summary["mode"] == "diloco" else "data-parallel training"


def _status(summary: Summary) -> str:
    if summary["status"] == "complete":
        return "The run came to its end."
    if summary["status"] == "stopped":
        return f"The run was stopped after {summary['inner_steps']:,} inner steps, before its end."
    steps = f"{summary['inner_steps']:,} inner steps"
    return f"The run failed after {steps} ({summary['error']}); these are the last agreed weights."


def _checkpoint(summary: Summary, steps: int) -> str:
    return f"These are the weights of a checkpoint, after {summary['inner_steps']:,} of {steps:,} inner steps."


def _what(summary: Summary, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    model = options["model.name"]
    tokenizer = options.get("data.tokenizer")
    start = f"the weights of {_public(model)}" if is_pretrained(model) else f"random weights, preset {model}"
    return [
        ("started from", start),
        ("shape", _shape(options)),
        ("parameters", _number(summary["parameters"])),
        ("trained", _lora(summary, options)),
        ("data", _public(options["data.source"])),
        ("tokenizer", _tokenizer(model, tokenizer, options["data.vocab_size"])),
        ("sequence length", _number(options["data.sequence_length"])),
    ]


def _lora(summary: Summary, options: Mapping[str, Any]) -> str:
    rank = options.get("lora.rank")
    if rank is None:
        return ""
    return f"{_number(summary.get('trainable_parameters'))} parameters, LoRA adapters of rank {rank}"


def _shape(options: Mapping[str, Any]) -> str:
    """Return the shape of a model that began with random weights; empty for others, whose config.json has it."""
    given = {key.removeprefix("model."): value for key, value in options.items() if key.startswith("model.")}
    return ", ".join(f"{key} {value}" for key, value in given.items() if key != "name")


def _tokenizer(model: str, tokenizer: str | None, vocab_size: int) -> str:
    if tokenizer is None:
        return f"byte-level BPE of at most {vocab_size:,} tokens, trained on the data"
    own = is_pretrained(model) and Path(model.removeprefix("hf:")) in (Path(tokenizer), Path(tokenizer).parent)
    return "the model's own" if own or tokenizer == model else _public(tokenizer)


def _how(summary: Summary, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("workers", str(summary["workers"])),
        ("inner steps of each", _number(summary["inner_steps"])),
        ("tokens, all workers", _number(summary["tokens"])),
        ("inner optimizer", _inner(options)),
    ]
    if summary["mode"] == "diloco":
        if options.get("sync.warm_start"):
            how = "by one worker alone" if summary.get("engine") in ("swarm", "bucket") else "data-parallel"
            rows.append(("warm start", f"the first {_number(options['sync.warm_start'])} steps {how}"))
        rows.append(("inner steps between rounds (H)", _between_rounds(summary, options)))
        rows.append(("outer optimizer", _outer(options)))
    failed = f", {summary['rounds_failed']} failed" if summary["rounds_failed"] else ""
    return [*rows, ("rounds", f"{_number(summary['rounds'])}{failed}"), ("codec", summary["codec"])]


def _between_rounds(summary: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    growth = options.get("sync.growth")
    return f"{summary['num_inner_steps']}" + (f", growing with α = {growth}" if growth else "")


def _inner(options: Mapping[str, Any]) -> str:
    name = {"adamw": "AdamW", "muon": "Muon"}[options.get("inner.optimizer", "adamw")]
    return f"{name}, peak learning rate {options['inner.lr']}, batch {options['training.batch_size']}"


def _outer(options: Mapping[str, Any]) -> str:
    """Return the outer optimizer with its numbers, those included that the run file leaves to their defaults."""
    name = options["outer.optimizer"]
    numbers = {key: options.get(f"outer.{key}", default) for key, default in OUTER_NUMBERS[name].items()}
    return ", ".join([name, *(f"{key} {value}" for key, value in numbers.items())])


def _result(summary: Summary) -> list[tuple[str, str]]:
    before = summary["initial_validation_perplexity"]
    after = summary["validation_perplexity"]
    start = f" (before: {before:,.2f})" if before is not None else ""
    sent = summary["bytes_sent_per_worker"]
    baseline = summary["data_parallel_bytes_per_worker"]
    return [
        ("validation perplexity", f"{after:,.2f}{start}" if after is not None else "not measured"),
        ("sent by a worker", f"{_number(sent)} bytes (fp32 data-parallel training: {_number(baseline)})"),
        ("seconds", f"{summary['seconds']:,.0f}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items())),
    ]


def _every_value(summary: Summary) -> str:
    """Return all values with which the run trained, but for those that say something of a machine only."""
    values = {key: value for key, value in summary.get("resolved", {}).items() if key not in _MACHINE_OPTIONS}
    if not values:
        return ""
    values |= {key: _public(values[key]) for key in _PATHS if values.get(key)}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["", "Every value with which it was trained:", "", "```", *lines, "```", ""])


def _public(name: str) -> str:
    """Return a name without local folders: of a path its last part."""
    return Path(name).name if is_local(name) else name.removeprefix("hf:")


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
