"""A run folder as `diloco train` leaves it, without the training."""

import json
from pathlib import Path

from diloco.models.registry import build_model
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.records.summary import Summary, summarize
from pretrained.folders import END, make_folder


def make_run(folder: Path, config: RunConfig | None = None, *, model: str | None = None, **numbers: object) -> Summary:
    """A run of `model` (default: a small Llama folder beside it, trained natively); returns its summary."""
    if model is None:
        model = str(make_folder(folder.parent / "base"))
    folder.mkdir()
    config = config or RunConfig(model=model)
    (folder / "config.toml").write_text(to_toml(config))
    summary = summarize(config, []) | {"status": "complete", "error": None} | numbers
    (folder / "summary.json").write_text(json.dumps(summary))
    tokenizer = Path(model.removeprefix("hf:")) / "tokenizer.json"
    built = build_model(model, vocab_size=1, sequence_length=1)
    built.save(folder / "model", tokenizer_path=tokenizer, end_of_text=END)
    return summary
