"""The defaults of a model, a mode and an engine, where the user gives no value. Torch-free.

defaults < recipe of the model, mode and engine < run file < command line.
"""

from collections.abc import Collection

from diloco.errors import ConfigError
from diloco.models.pretrained import check_model, is_pretrained
from diloco.training.config.run import RunConfig

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
FINE_TUNING: dict[str, object] = {
    # A pre-trained model knows most of what it needs: small steps that change it gently, and no long warm-up.
    "steps": 500,
    "inner.lr": 5e-5,
    "inner.warmup_steps": 20,
    # Plain averaging: in some ten rounds momentum gains little, and this cannot overshoot.
    "outer.optimizer": "sgd",
    "sync.num_inner_steps": 50,
    "training.batch_size": 8,
    "training.sample_prompt": "",
}
FINE_TUNING_LENGTH = 1024
"""Tokens of a sequence if a pre-trained model takes that many."""


def model_recipe(model: str, asked: Collection[str]) -> dict[str, object]:
    """The defaults of a model. A pre-trained one brings its tokenizer, unless that is among the keys `asked` for."""
    if not is_pretrained(model):
        return dict(RECIPES.get(model, {}))
    found = check_model(model, weights=False)
    assert found is not None
    recipe = dict(FINE_TUNING)
    recipe["data.sequence_length"] = min(FINE_TUNING_LENGTH, found.max_sequence_length or FINE_TUNING_LENGTH)
    if "data.tokenizer" not in asked:
        recipe["data.tokenizer"] = found.tokenizer
    if any(key.startswith("outer.") and key != "outer.lr" for key in asked):  # numbers that plain SGD does not take
        del recipe["outer.optimizer"]
    return recipe


def check_run_model(config: RunConfig) -> None:
    """Refuse a model that cannot be built or does not fit the run, before anything is prepared. May download it."""
    found = check_model(config.model)
    if found is None:
        return
    if config.data.tokenizer is None:
        raise ConfigError(
            f"model {config.model!r} was trained with a tokenizer, and data.tokenizer is none: its weights mean "
            f"nothing with a new one; give the model's folder"
        )
    found.check(vocab_size=1, sequence_length=config.data.sequence_length)


MODE_DEFAULTS: dict[str, dict[str, object]] = {
    "diloco": {},
    "data-parallel": {"sync.codec": "fp32"},  # the classical baseline averages gradients in full precision
}
ENGINE_DEFAULTS: dict[str, dict[str, object]] = {
    "torch_distributed": {},
    "swarm": {"workers": 1},  # the others join
}
