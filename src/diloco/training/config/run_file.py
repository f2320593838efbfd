"""From a run file and a command line to one validated RunConfig, and back to a file.

Raw values are merged first (recipe of the model and mode < run file < command line) and validated once, by the command
line's parser and the dataclasses themselves; nothing is edited afterwards. A key of the file is an option of the
command line: `lr` under `[outer]` is `--outer.lr`.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from diloco.core.config import OUTER_NUMBERS
from diloco.core.options import scopes
from diloco.data.config import DataConfig
from diloco.errors import ConfigError
from diloco.models.choice import ModelChoice
from diloco.models.lora import DEFAULT_RANK
from diloco.models.pretrained import is_pretrained
from diloco.own_command import command
from diloco.training.config.recipes import (
    ENGINE_DEFAULTS,
    MODE_DEFAULTS,
    chosen_recipe,
    model_recipe,
    recipe_names,
    recipe_numbers,
    text_recipe,
)
from diloco.training.config.run import RunConfig, may_change

_FRACTION = re.compile(r"[+-]?[\d_]*\.[\d_]*(e[+-]?\d+)?", re.IGNORECASE)
_OTHER_WORDS = {"learning_rate": "lr", "epochs": "steps", "max_steps": "steps", "num_workers": "workers"}
ALIASES = {"lora": "lora.rank", "codec": "sync.codec", "H": "sync.num_inner_steps", "model": "model.name"}

_TOLD = (
    "steps",
    "inner.lr",
    "inner.warmup_steps",
    "outer.optimizer",
    "outer.lr",
    "outer.momentum",
    "sync.num_inner_steps",
    "sync.codec",
    "training.batch_size",
    "data.sequence_length",
)
"""The options that the line on a run's recipe names, besides those that the recipe itself has."""


def sections(config: RunConfig) -> dict[str, Any]:
    """Return the dataclasses of a run by the name of their table in a run file; the run's own keys are under ""."""
    inner = {field.name: getattr(config, field.name) for field in fields(config)}
    return {"": config, **{name: value for name, value in inner.items() if is_dataclass(value)}}


def own_fields(section: Any) -> list[str]:
    """Return the names of a section's values, without the sections inside it."""
    return [field.name for field in fields(section) if not is_dataclass(getattr(section, field.name))]


@cache
def known_keys() -> list[str]:
    """Return every dotted key of a run, in order."""
    tables = sections(RunConfig()).items()
    return [dotted(table, name) for table, section in tables for name in own_fields(section)]


def dotted(table: str, name: str) -> str:
    return f"{table}.{name}" if table else name


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the dotted keys of a TOML file; unknown ones are refused with the nearest name."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"run file {path} does not exist") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"run file {path} cannot be read as TOML: {error}") from error
    if isinstance(raw.get("model"), str):
        raw["model"] = {"name": raw["model"]}
    values = dict(_flatten(raw))
    _check_device(values)
    known = known_keys()
    for key, value in values.items():
        if key not in known:
            hint = did_you_mean(key, "'{}'") or f"; `{command('train', '--print-config')}` lists all keys"
            raise ConfigError(f"run file {path}: unknown key '{key}'{hint}")
        if (rule := _broken_type(key, value)) is not None:
            raise ConfigError(f"run file {path}: {key} = {_shown(value)} must be {rule}")
    return values


def _broken_type(key: str, value: object) -> str | None:
    """Return what a value of a run file must be, if it is not; numbers and truth values may be written as text."""
    choices = _types()[key]
    if isinstance(value, str) and value.lower() == "none" and type(None) in choices:
        return None
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): '"none"'}
    readable: dict[Any, Callable[[], object]] = {
        int: lambda: re.fullmatch(r"[+-]?\d+", str(value)),
        float: lambda: _is_number(str(value)),
        bool: lambda: str(value).lower() in ("true", "false"),
        str: lambda: isinstance(value, str | int | float) and not isinstance(value, bool),
    }
    for choice in choices:
        if (readable[choice]() if choice in readable else value == choice) and not (
            isinstance(value, bool) and choice is not bool
        ):
            return None
    named = [words.get(choice, f'"{choice}"') for choice in choices]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} or {named[-1]}"


@cache
def _types() -> dict[str, tuple[Any, ...]]:
    """Return what the value of each dotted key may be: types, and the words of a Literal."""
    kinds: dict[str, tuple[Any, ...]] = {}
    for table, section in sections(RunConfig()).items():
        hints = get_type_hints(type(section))
        for name in own_fields(section):
            union = get_args(hints[name]) if get_origin(hints[name]) in (Union, UnionType) else (hints[name],)
            kinds[dotted(table, name)] = tuple(
                choice for kind in union for choice in (get_args(kind) if get_origin(kind) is Literal else (kind,))
            )
    return kinds


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else _token(value)


def did_you_mean(name: str, form: str = "--{}") -> str:
    """Return for an error message the keys that an unknown name may stand for; empty if no key is near.

    lr may be inner.lr or outer.lr, but outer.learning_rate is outer.lr.
    """
    table, _, last = name.replace("-", "_").rpartition(".")
    last = _OTHER_WORDS.get(last, last)
    near = [ALIASES[last]] if last in ALIASES else []
    near = near or [key for key in known_keys() if key == f"{table}.{last}"]
    near = near or [key for key in known_keys() if key.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(name, known_keys(), n=1, cutoff=0.7)
    if not near:
        parts = {key.rpartition(".")[2]: key for key in reversed(known_keys())}
        near = [parts[part] for part in difflib.get_close_matches(last, parts, n=1, cutoff=0.6)]
    return f"; did you mean {' or '.join(form.format(key) for key in near)}?" if near else ""


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in values.items():
        items += _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return items


def merge(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command-line tokens of `train` with everything that the recipe and the run file add, and notes for the
    user.

    The run file, if any, is the first token.
    """
    tokens = _join_flags([_unalias(token) for token in _with_lora_rank(tokens)])
    if "resume" in _given(tokens):
        return _merge_resumed(tokens), []
    has_file = bool(tokens) and not tokens[0].startswith("-")
    file = read_run_file(Path(tokens[0])) if has_file else {}
    given = _given(tokens)
    _check_tables(given)
    _check_whole(file | given)
    _check_device(file | given)
    model = str(given.get("model.name", file.get("model.name", ModelChoice.name)))
    mode = str(given.get("mode", file.get("mode", RunConfig.mode)))
    engine = str(given.get("engine", file.get("engine", RunConfig.engine)))
    notes = _check_effect(mode, engine, file, given)
    file, of_another = _without_shape_of_another(model, file)
    notes += of_another
    name, not_used = _recipe_name(model, file, given)
    notes += not_used
    recipe = ENGINE_DEFAULTS.get(engine, {}) | _recipe(name, model, mode, file | given)
    merged = {key: value for key, value in (recipe | file | {"recipe": name}).items() if key not in given}
    return [f"--{key}={_token(value)}" for key, value in merged.items()] + tokens[has_file:], notes


def _recipe_name(model: str, file: Mapping[str, Any], given: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the recipe that holds; one of the run file that does not fit the command line is not used, which is a
    note."""
    asked = {**file, **given}
    try:
        return chosen_recipe(asked.get("recipe"), model, asked)[0], []
    except ConfigError as error:
        if "recipe" in given or not given:
            raise
        return chosen_recipe(None, model, asked)[0], [f"the run file's recipe is not used: {error}"]


def recipe_line(config: RunConfig) -> str:
    """Return what a run's recipe decides, for its user: every number that holds, and those that were given instead."""
    assert config.recipe is not None, "merge() has decided it"
    values = config.values()
    recipe = recipe_numbers(config.recipe, config.model.name, values) | MODE_DEFAULTS.get(config.mode, {})
    defaults = RunConfig().values() | recipe
    if config.outer.optimizer != defaults["outer.optimizer"]:  # the recipe's numbers are another optimizer's
        defaults |= {key: None for key in values if key.startswith("outer.") and key != "outer.optimizer"}
    outer_numbers = {f"outer.{name}": number for name, number in OUTER_NUMBERS[config.outer.optimizer].items()}
    unused = _unused_with("mode", config.mode) | _unused_with("engine", config.engine)
    unused |= {f"outer.{name}" for name in ("lr", "momentum")} - outer_numbers.keys()
    if is_pretrained(config.model.name):
        unused.add("data.sequence_length")  # the model's, not the recipe's
    numbers = [key for key in values if key in {*_TOLD, *recipe} - unused]
    short = {key: alias for alias, key in ALIASES.items()}

    def listed(keys: list[str]) -> str:
        held = {key: outer_numbers.get(key) if values[key] is None else values[key] for key in keys}
        return ", ".join(f"{short.get(key, key)} {_token(value)}" for key, value in held.items())

    kept = listed([key for key in numbers if values[key] == defaults[key]])
    given = listed([key for key in numbers if values[key] != defaults[key]])
    parts = [kept, f"given: {given}" if given else ""]
    usual, reason = chosen_recipe(None, config.model.name, values)
    why = f" ({reason})" if reason is not None and usual == config.recipe else ""
    others = " or ".join(name for name in recipe_names(config.model.name, values) if name != config.recipe)
    return (
        f"recipe {config.recipe}{why}: {'; '.join(filter(None, parts))} "
        f"(--recipe {others} for other defaults, --print-config for all options)"
    )


def _without_shape_of_another(model: str, file: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a run file without the shape of its model, if the command line names another model; and a
    note."""
    named = file.get("model.name", ModelChoice.name)
    shape = [key for key in file if key.startswith("model.") and key != "model.name"]
    if model == named or not shape:
        return dict(file), []
    note = f"the run file has the shape of {named} ({', '.join(shape)}): it is not used, since --model names {model}"
    return {key: value for key, value in file.items() if key not in shape}, [note]


def options(tokens: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Read options that do not make a whole run; return the tokens as the parser takes them, and their values by
    name."""
    tokens = _join_flags([_unalias(token) for token in _with_lora_rank(tokens)])
    given = _given(tokens)
    _check_tables(given)
    _check_whole(given)
    _check_device(given)
    return tokens, given


def _merge_resumed(tokens: Sequence[str]) -> list[str]:
    """Merge the run file of a resumed run with the options on the command line that may change on resume."""
    given = _given(tokens)
    named = given.pop("resume")
    if not named or named.startswith("--"):
        raise ConfigError("--resume without a run folder: name the one to continue, as in --resume runs/RUN")
    folder = Path(named)
    path = folder / "config.toml"
    if not tokens[0].startswith("-"):
        raise ConfigError(f"--resume {folder} has a run file of its own, {path}: leave {tokens[0]} out")
    if not folder.is_dir() or not path.exists():
        missing = "there is no such folder" if not folder.is_dir() else "it has no config.toml"
        raise ConfigError(f"--resume {folder} is not a run folder: {missing}")
    file = read_run_file(path)
    _check_tables(given)
    _check_whole(given)
    if "out" in given:
        raise ConfigError(f"--out {given['out']} with --resume: a resumed run stays in its folder")
    for key, value in given.items():
        if key in known_keys() and not may_change(key) and not _same(value, file.get(key)):
            raise ConfigError(
                f"--{key} {value}: this run was started with {key} = {_token(file.get(key, 'none'))}, and another "
                "value would make another run of it; leave it out, or start a new run"
            )
    _check_switched_off(file, given)
    kept = {key: value for key, value in file.items() if key not in given and key != "out"}
    return [f"--{key}={_token(value)}" for key, value in kept.items()] + [f"--out={folder}"] + list(tokens)


def _same(text: str, value: object) -> bool:
    """Return whether an option says what a run file has: 0.50 is 0.5."""
    if text.lower() == _token("none" if value is None else value).lower():
        return True
    try:
        return float(text) == float(str(value))
    except ValueError:
        return False


def _recipe(name: str, model: str, mode: str, asked: Mapping[str, Any]) -> dict[str, object]:
    """Return the defaults of model and mode, without those that belong to a choice that the user made otherwise."""
    text = text_recipe(str(asked.get("data.source", DataConfig.source)))
    recipe = text | model_recipe(name, model, asked) | MODE_DEFAULTS.get(mode, {})
    if "data.tokenizer" in asked:  # it brings its own vocabulary
        recipe.pop("data.vocab_size", None)
    if "outer.optimizer" in asked:  # the numbers are another optimizer's
        recipe = {key: value for key, value in recipe.items() if not key.startswith("outer.")}
    return recipe


def _with_lora_rank(tokens: Sequence[str]) -> list[str]:
    """Write `--lora` as `--lora.rank`: that of the number that follows, of --lora.rank if that is given too, else the
    default."""
    if "--lora" not in tokens:
        return list(tokens)
    at = tokens.index("--lora")
    before = list(tokens[:at])
    after = list(tokens[at + 1 :])
    if after and after[0].isdecimal():
        return [*before, f"--lora.rank={after[0]}", *after[1:]]
    has_rank = any(token.partition("=")[0] in ("--lora.rank", "--lora-rank") for token in [*before, *after])
    return [*before, *after] if has_rank else [*before, f"--lora.rank={DEFAULT_RANK}", *after]


def _unalias(token: str) -> str:
    """Write `--codec int8` as `--sync.codec int8`; dashes within a name are underscores."""
    if not token.startswith("--"):
        return token
    name, equals, value = token[2:].partition("=")
    name = ALIASES.get(name, name)
    known = name.replace("-", "_")
    return f"--{known if known in known_keys() else name}{equals}{value}"


def _join_flags(tokens: Sequence[str]) -> list[str]:
    """Write `--compute.compile true` as one token: the parser knows flags with and without =, but not with a space."""
    joined: list[str] = []
    for token in tokens:
        flag = joined and joined[-1].startswith("--") and joined[-1][2:] in _keys_of(bool)
        if flag and token.lower() in ("true", "false", "none"):
            joined[-1] += f"={token}"
        elif flag and not token.startswith("-"):
            raise ConfigError(f"{joined[-1]} {token}: it must be true or false (a run file comes first)")
        else:
            joined.append(token)
    return joined


def _given(tokens: Sequence[str]) -> dict[str, str]:
    """Return the options on the command line with their values, as text."""
    given = {}
    for token, following in zip(tokens, [*tokens[1:], ""], strict=False):
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            given[name] = value if equals else following
    return given


def _check_tables(given: Mapping[str, str]) -> None:
    """Refuse a whole table as one option: the parser would take it as JSON, unchecked."""
    for table in (sections(RunConfig()).keys() - {""}) & given.keys():
        example = next(key for key in known_keys() if key.startswith(f"{table}."))
        raise ConfigError(f"--{table} is a table of options: give them one by one, as in --{example}")


@cache
def _keys_of(kind: type) -> frozenset[str]:
    tables = sections(RunConfig()).items()
    return frozenset(
        dotted(t, field.name) for t, s in tables for field in fields(s) if field.type in (kind, kind | None)
    )


def _check_whole(values: Mapping[str, Any]) -> None:
    """Refuse 2.7 steps, which the command line's parser would round to 3 without a word."""
    for key in _keys_of(int) & values.keys():
        if _FRACTION.fullmatch(str(values[key])):
            raise ConfigError(f"{key} = {values[key]} must be a whole number")


def _check_device(values: Mapping[str, Any]) -> None:
    if values.get("device") == "mps":
        raise ConfigError(
            "device = mps: Apple GPUs are not supported, since the outer step is tested to be the same, bit for bit, "
            "on CPUs and CUDA devices only: use --device cpu"
        )


def _token(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_effect(mode: str, engine: str, file: Mapping[str, Any], given: Mapping[str, str]) -> list[str]:
    """Refuse options of the command line that have no effect in this mode or engine; returns a note on those of a run
    file, which other runs may share."""
    notes = []
    for name, chosen in (("mode", mode), ("engine", engine)):
        unused = _unused_with(name, chosen)
        for key in given:
            if key in unused:
                raise ConfigError(f"--{key} has no effect in {name} '{chosen}': leave it out")
        ignored = [key for key in file if key in unused]
        notes += [f"{name} '{chosen}' has no use for {', '.join(ignored)} of the run file"] if ignored else []
    _check_switched_off(file, given)
    return notes


def _check_switched_off(file: Mapping[str, Any], given: Mapping[str, str]) -> None:
    """Refuse an option of something that is switched off by 0, if the command line has it: an earlier run's file has
    them all."""
    for key in given:
        scope = scopes(RunConfig).get(key)
        switch, value = scope.unused_with if scope and scope.unused_with else ("", None)
        if value == 0 and _same(str(given.get(switch, file.get(switch, "none"))), 0):
            raise ConfigError(f"--{key} has no effect with {switch} = 0: leave out one of the two")


def _unused_with(key: str, value: str) -> set[str]:
    return {name for name, scope in scopes(RunConfig).items() if scope.unused_with == (key, value)}


def to_toml(config: RunConfig, comments: Mapping[str, str] | None = None) -> str:
    """Return a run file that gives this configuration. TOML has no null: a key that is None is "none" or left out."""
    lines: list[str] = []
    for table, section in sections(config).items():
        unused = table == "swarm" and not config.elastic  # explained, but not set: it would have no effect
        if unused and not comments:
            continue
        lines += ["", f"[{table}]"] if table else []
        for name in own_fields(section):
            value = getattr(section, name)
            default = getattr(type(section), name)
            if value is None and default is not None:
                value = "none"
            if value is not None or comments:
                line = f"{name} = {_literal(value)}" if value is not None else f"# {name} ="
                comment = (comments or {}).get(dotted(table, name))
                lines.append(("# " if unused else "") + line + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    """Return a value in TOML: as in JSON, but for infinity and the character DEL."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
