"""The defaults of a model, a mode and an engine, where the user gives no value. Torch-free.

defaults < recipe of the model, mode and engine < run file < command line.

A recipe has a name (`--recipe`), and an option that is given replaces its own value in it and no other:

    warm    tiny only, its default: the first quarter of the steps data-parallel, then short rounds, all with 4 bits
    plain   the numbers of the model, without a warm start; a pre-trained model's are those of fine-tuning
    paper   the DiLoCo paper's, whatever the model's size
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.models.choice import ModelChoice
from diloco.models.lora import check_peft
from diloco.models.native.presets import PRESETS, preset
from diloco.models.pretrained import check_model, is_pretrained
from diloco.training.config.run import ELASTIC_ENGINES, RunConfig

_LARGE: dict[str, object] = {"data.sequence_length": 1024, "data.vocab_size": 32_000}
RECIPES: dict[str, dict[str, object]] = {
    "tiny": {
        "steps": 800,
        "inner.lr": 3e-3,
        "inner.warmup_steps": 100,
        "outer.momentum": 0.5,  # of some 30 rounds; 0.9 remembers ten of them, which is right for the paper's 128
        "sync.num_inner_steps": 30,
        "training.batch_size": 8,
        "data.sequence_length": 128,
    },
    "60m": _LARGE,
    "150m": _LARGE,
    "400m": _LARGE,
    "llama-150m": _LARGE,
    "llama-1b": _LARGE | {"sync.num_inner_steps": 125},  # OpenDiLoCo's H for this model
}
_TINY_WARM: dict[str, object] = {
    # Found by measuring (docs/figures.md), together with a warm start of a quarter of the steps.
    "sync.codec": "int4",
    "sync.num_inner_steps": 15,
    "outer.momentum": 0.8,
}
FINE_TUNING: dict[str, object] = {
    # A pre-trained model knows most of what it needs: small steps that change it gently, and no long warm-up.
    "steps": 500,
    "inner.lr": 5e-5,
    "inner.warmup_steps": 20,
    # Plain averaging: in some ten rounds momentum gains little, and this cannot overshoot.
    "outer.optimizer": "sgd",
    "sync.num_inner_steps": 50,
    "training.batch_size": 8,
}
RECIPE_NAMES = ("warm", "plain", "paper")
LORA: dict[str, object] = {"inner.lr": 2e-4}
"""The numbers of fine-tuning with adapters, which start at zero and bear larger steps than trained weights."""
FINE_TUNING_LENGTH = 1024
"""Tokens of a sequence if a pre-trained model takes that many."""
MODE_DEFAULTS: dict[str, dict[str, object]] = {
    "diloco": {},
    "data-parallel": {"sync.codec": "fp32"},  # the classical baseline averages gradients in full precision
}
ENGINE_DEFAULTS: dict[str, dict[str, object]] = {
    "torch_distributed": {},
    "swarm": {"workers": 1},  # the others join
    "bucket": {"workers": 1},
}
_FOLDERS_READ = 100  # to know whether a folder is of Python


def text_recipe(source: str) -> dict[str, object]:
    """Return the defaults of a text: a sample of a model that was trained on Python starts as Python does."""
    return {"training.sample_prompt": "def "} if _is_python(source) else {}


def _is_python(source: str) -> bool:
    """Return whether a text is Python: its library, a .py file, or a folder of more such files than others."""
    path = Path(source).expanduser()
    if source == "stdlib" or path.suffix == ".py":
        return True
    if "\0" in source:  # no file can have such a name
        return False
    hidden = re.compile(r"/(\.|__pycache__)")
    files = [
        name
        for folder, _, names in islice(os.walk(path), _FOLDERS_READ)
        if not hidden.search(folder.removeprefix(str(path)))
        for name in names
    ]
    return 2 * sum(name.endswith(".py") for name in files) > len(files)


def chosen_recipe(name: object, model: str, asked: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the recipe's name, and why it is not the model's usual one (None: it is, or was asked for by `name`)."""
    if name is None:
        return ("plain", None) if model != "tiny" else _tiny_recipe(asked)
    if name not in RECIPE_NAMES:
        raise ConfigError(f"recipe = {name!r} must be one of {', '.join(RECIPE_NAMES)}")
    if name == "warm" and model != "tiny":
        raise ConfigError(
            f"recipe = warm has the numbers of the model tiny, and model = {model}: use plain or paper; a warm start "
            "alone is --sync.warm_start N"
        )
    if name == "warm" and asked.get("mode") == "data-parallel":
        raise ConfigError(
            "recipe = warm has no effect in mode 'data-parallel', which averages at every step: use plain"
        )
    return str(name), None


def recipe_names(model: str, asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the recipes that can be chosen with a model and with what is `asked` for."""
    has_warm = model == "tiny" and (asked.get("engine") in ELASTIC_ENGINES or _tiny_recipe(asked)[0] == "warm")
    return RECIPE_NAMES if has_warm else RECIPE_NAMES[1:]


def _tiny_recipe(asked: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the recipe of tiny: with a warm start, or without one and the thing `asked` for that rules it out."""
    reasons = {
        "mode = data-parallel averages at every step": asked.get("mode") == "data-parallel",
        "in a swarm the others would wait for a warm start": asked.get("engine") in ELASTIC_ENGINES,
        f"ranks = {asked.get('ranks')} has no warm start": str(asked.get("ranks", "1")) != "1",
        "compute.precision = fp16 has no warm start": asked.get("compute.precision") == "fp16",
        "sync.asynchronous has no warm start": str(asked.get("sync.asynchronous", "false")).lower() != "false",
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    return ("warm", None) if reason is None else ("plain", reason)


def model_recipe(name: str, model: str, asked: Mapping[str, Any]) -> dict[str, object]:
    """Return the defaults of a model in the recipe `name`. A preset brings its shape, a pre-trained model its
    tokenizer, where nothing else is `asked` for (values by dotted key, as text if they are options)."""
    if not is_pretrained(model):
        return recipe_numbers(name, model, asked) | _shape(model, asked)
    pretrained = check_model(model, weights=False)
    assert pretrained is not None
    recipe = recipe_numbers(name, model, asked)
    recipe["data.sequence_length"] = min(FINE_TUNING_LENGTH, pretrained.max_sequence_length or FINE_TUNING_LENGTH)
    if "data.tokenizer" not in asked:
        recipe["data.tokenizer"] = pretrained.tokenizer
    return recipe


def _asks_for_lora(asked: Mapping[str, Any]) -> bool:
    return str(asked.get("lora.rank", "none")).lower() != "none"


def recipe_numbers(name: str, model: str, asked: Mapping[str, Any]) -> dict[str, object]:
    """Return what a recipe says of training: by dotted key, without the model's own shape and tokenizer."""
    if name == "paper":  # RunConfig's own defaults, with the vocabulary and the sequences of the model
        return {key: value for key, value in RECIPES.get(model, {}).items() if key.startswith("data.")}
    if is_pretrained(model):
        return FINE_TUNING | (LORA if _asks_for_lora(asked) else {})
    numbers = dict(RECIPES.get(model, {}))
    if name == "warm":
        steps = _whole(asked.get("steps", numbers["steps"])) or 0
        numbers |= _TINY_WARM | {"sync.warm_start": steps // 4}
    return numbers


def _shape(model: str, asked: Mapping[str, Any]) -> dict[str, object]:
    """Return the shape of a preset, with what follows from the sizes that are asked for."""
    if model not in PRESETS:
        return {}
    names = [field.name for field in fields(ModelChoice) if field.name != "name"]
    given = {name: _whole(asked[f"model.{name}"]) for name in names if f"model.{name}" in asked}
    shape = asdict(preset(model, shape={name: value for name, value in given.items() if value is not None}))
    return {f"model.{name}": shape[name] for name in names}


def _whole(value: object) -> int | None:
    """Return None for what is not a whole number above 0: the parser refuses it, or it has no effect on other sizes."""
    text = str(value)
    return int(text) if text.isdecimal() and int(text) else None


def check_run_model(config: RunConfig) -> None:
    """Refuse a model that cannot be built or does not fit the run, before anything is prepared. May download it."""
    pretrained = check_model(config.model.name)
    if pretrained is None:
        return
    if config.data.tokenizer is None:
        raise ConfigError(
            f"model {config.model.name!r} was trained with a tokenizer, and data.tokenizer is none: its weights mean "
            f"nothing with a new one; give the model's folder"
        )
    pretrained.check(vocab_size=1, sequence_length=config.data.sequence_length)
    if config.lora.rank is not None:
        check_peft()
