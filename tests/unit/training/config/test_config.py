"""From defaults, recipe, run file and command line to one validated RunConfig, and back to a file."""

import dataclasses
import re
from pathlib import Path

import pytest

from diloco.cli.main import app, run
from diloco.core.config import OUTER_NUMBERS, OuterConfig, SyncConfig
from diloco.data.config import DataConfig
from diloco.errors import ConfigError
from diloco.training.config.recipes import RECIPES
from diloco.training.config.run import InnerConfig, RunConfig, TrainingConfig
from diloco.training.config.run_file import ALIASES, known_keys, merge, recipe_line, sections, to_toml


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrongly not refused would start a run: not in the repository."""
    monkeypatch.chdir(tmp_path)


def resolved(*tokens: str | Path) -> RunConfig:
    """What `diloco train` would run with."""
    merged, _ = merge([str(token) for token in tokens])
    _, bound, _ = app.parse_args(["train", *merged], exit_on_error=False, print_error=False)
    config: RunConfig = bound.arguments.get("config", RunConfig())
    return config


def run_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(capsys: pytest.CaptureFixture[str], *tokens: str | Path) -> str:
    """The one message of a command line that is refused with exit code 2."""
    assert run(["train", *(str(token) for token in tokens)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


# Which value wins


def test_a_value_comes_from_the_command_line_before_the_file_before_the_recipe_before_the_defaults(
    tmp_path: Path,
) -> None:
    file = run_file(tmp_path, "steps = 70\n[inner]\nlr = 0.5\n[outer]\nlr = 0.25\n")
    config = resolved(file, "--inner.lr", "0.125")
    assert config.inner.lr == 0.125  # command line, although file and recipe have it
    assert config.steps == 70 != RECIPES["tiny"]["steps"]  # file, although the recipe has it
    assert config.outer.lr == 0.25
    assert config.training.batch_size == RECIPES["tiny"]["training.batch_size"] != TrainingConfig().batch_size
    assert config.inner.beta1 == InnerConfig().beta1  # a default that no recipe changes


@pytest.mark.parametrize("where", ["file", "command line"])
def test_the_recipe_is_that_of_the_model_that_is_asked_for(tmp_path: Path, where: str) -> None:
    tokens = [run_file(tmp_path, 'model = "llama-1b"')] if where == "file" else ["--model=llama-1b"]
    config = resolved(*tokens)
    assert config.data.sequence_length == 1024
    assert config.sync.num_inner_steps == 125
    assert config.training.batch_size == TrainingConfig().batch_size  # nothing of tiny's recipe


def test_the_baseline_sends_fp32_unless_something_else_is_asked_for(tmp_path: Path) -> None:
    assert resolved("--mode", "data-parallel").sync.codec == "fp32"
    assert resolved("--mode", "diloco", "--recipe", "plain").sync.codec == "fp16"
    assert resolved(run_file(tmp_path, 'mode = "data-parallel"')).sync.codec == "fp32"
    assert resolved("--mode", "data-parallel", "--codec", "bf16").sync.codec == "bf16"


@pytest.mark.parametrize(
    ("tokens", "key", "value"),
    [
        (["--codec", "int8"], "sync.codec", "int8"),
        (["--codec=int8"], "sync.codec", "int8"),
        (["--H", "7"], "sync.num_inner_steps", 7),
        (["--H=7"], "sync.num_inner_steps", 7),
        (["--sync.num-inner-steps", "7"], "sync.num_inner_steps", 7),
        (["--sync.num_inner_steps", "7"], "sync.num_inner_steps", 7),
        (["--training.batch-size=4"], "training.batch_size", 4),
        (["--inner.clip_norm", "none"], "inner.clip_norm", None),
        (["--sync.max-norm-ratio=none"], "sync.max_norm_ratio", None),
        (["--training.sample_prompt", ""], "training.sample_prompt", ""),
        (["--training.sample_prompt=--H=3"], "training.sample_prompt", "--H=3"),
        (["--data.source", "some-folder/with-dashes"], "data.source", "some-folder/with-dashes"),
    ],
)
def test_an_option_is_found_under_its_alias_with_dashes_or_underscores_and_none_is_none(
    tokens: list[str], key: str, value: object
) -> None:
    table, _, name = key.rpartition(".")
    assert getattr(sections(resolved(*tokens))[table], name) == value


def test_an_alias_wins_over_the_file_and_the_recipe(tmp_path: Path) -> None:
    file = run_file(tmp_path, '[sync]\ncodec = "bf16"\nnum_inner_steps = 9\n')
    given = resolved(file, "--codec", "int8", "--H", "5").sync
    assert (given.codec, given.num_inner_steps) == ("int8", 5)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[sync]\nH = 5", ["unknown key 'sync.H'", "did you mean 'sync.num_inner_steps'"]),
        ("H = 5", ["unknown key 'H'", "did you mean 'sync.num_inner_steps'"]),
        ('codec = "int8"', ["did you mean 'sync.codec'"]),
        ('steps = "many"', ['steps = "many" must be a whole number']),
        ("steps = 2.5", ["steps = 2.5 must be a whole number"]),
        ("workers = true", ["workers = true must be a whole number"]),
        ('[outer]\nlr = "fast"', ['outer.lr = "fast" must be a number or "none"']),
        ('[compute]\ncompile = "maybe"', ['compute.compile = "maybe" must be true or false or "none"']),
        ('mode = "federated"', ['mode = "federated" must be "diloco" or "data-parallel"']),
        ('sinks = ["wandb"]', ["sinks", 'must be text or "none"']),
    ],
)
def test_a_run_files_wrong_key_or_type_is_refused_with_the_files_name_and_what_is_right(
    text: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_file(tmp_path, text)
    message = complaint(capsys, file)
    assert message.startswith(f"error: run file {file}: ")
    assert all(part in message for part in parts), message


def test_every_alias_names_an_option_that_exists() -> None:
    assert set(ALIASES.values()) <= set(known_keys())


def test_a_number_of_the_recipe_gives_way_to_another_outer_optimizer_or_tokenizer() -> None:
    assert resolved("--outer.optimizer", "sgd").outer == OuterConfig(optimizer="sgd")
    assert resolved("--model", "60m", "--data.tokenizer", "t.json").data.vocab_size == DataConfig().vocab_size


# What is refused


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("worker = 3", "'worker'", "'workers'"),
        ("[outer]\nlearning_rate = 1.0", "'outer.learning_rate'", ""),
        ("[sync]\nnum_inner_step = 5", "'sync.num_inner_step'", "'sync.num_inner_steps'"),
        ("[sink]\ncodec = 'int8'", "'sink.codec'", "'sync.codec'"),
        ("outer = 3", "'outer'", ""),
        ("xyzzy = 1", "'xyzzy'", "--print-config"),
        ("lr = 1.0", "'lr'", "did you mean 'inner.lr' or 'outer.lr'?"),
        ("[outer]\nlearning_rate = 0.5", "'outer.learning_rate'", "did you mean 'outer.lr'?"),
        ("batch = 4", "'batch'", "did you mean 'training.batch_size'?"),
    ],
)
def test_an_unknown_key_of_the_run_file_is_refused_with_the_nearest_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, wrong: str, right: str
) -> None:
    message = complaint(capsys, run_file(tmp_path, text))
    assert f"unknown key {wrong}" in message
    assert "run.toml" in message
    assert right in message


@pytest.mark.parametrize(
    ("option", "right"),
    [
        ("--worker=3", "--workers"),
        ("--sync.num_inner_step=5", "--sync.num_inner_steps"),
        ("--outer.lrr=1", "--outer.lr"),
        ("--qqqqqqqq=1", "--qqqqqqqq"),
        ("--lr=1e-3", "did you mean --inner.lr or --outer.lr?"),
        ("--batch-size=3", "did you mean --training.batch_size?"),
        ("--learning_rate=1", "did you mean --inner.lr or --outer.lr?"),
        ("--tokenizer=x", "did you mean --data.tokenizer?"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], option: str, right: str
) -> None:
    message = complaint(capsys, option)
    assert option.partition("=")[0] in message
    assert right in message


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (["--workers", "0"], ["workers", "0", "at least 1"]),
        (["--steps", "0"], ["steps", "0", "at least 1"]),
        (["--steps", "2.7"], ["steps", "2.7", "whole number"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--steps"], ["--steps", "argument"]),
        (["--seed", "-1"], ["seed", "-1", "from 0"]),
        (["--seed", str(2**64)], ["seed", str(2**64), "from 0"]),
        (["--threads", "0"], ["threads", "0", "at least 1"]),
        (["--port", "70000"], ["port", "70000", "65535"]),
        (["--device", "tpu"], ["--device", "tpu", "cpu"]),
        (["--engine", "hivemind"], ["--engine", "hivemind", "torch_distributed"]),
        (["--mode", "ddp"], ["--mode", "ddp", "data-parallel"]),
        (["--codec", "int5"], ["codec", "int5", "int8"]),
        (["--H", "0"], ["sync.num_inner_steps", "0", "at least 1"]),
        (["--H", "-3"], ["sync.num_inner_steps", "-3", "at least 1"]),
        (["--sync.fragments", "0"], ["sync.fragments", "0", "at least 1"]),
        (["--sync.overlap_steps", "9", "--H", "9"], ["sync.overlap_steps", "9", "below"]),
        (["--sync.warm_start", "-1"], ["sync.warm_start", "-1", "at least 0"]),
        (["--sync.warm_start", "5", "--engine", "swarm", "--steps", "5"], ["sync.warm_start", "5", "lower it"]),
        (["--sync.second_moment_every", "6", "--ranks", "2"], ["sync.second_moment_every", "6", "ranks = 2"]),
        (["--sync.second_moment_every", "0"], ["sync.second_moment_every", "0", "at least 1"]),
        (["--sync.growth", "0.01", "--mode", "data-parallel"], ["sync.growth", "no effect", "data-parallel"]),
        (["--faults.drop", "0.3", "--mode", "data-parallel"], ["faults.drop", "no effect", "data-parallel"]),
        (["--faults.drop", "1"], ["faults.drop", "1", "below 1"]),
        (["--outer.warmup_rounds", "3"], ["outer.warmup_rounds", "3", "a number to begin with"]),
        (["--sync.warm_start", "5", "--ranks", "2"], ["sync.warm_start", "5", "ranks = 2", "--model RUN/model"]),
        (["--sync.warm_start", "5", "--compute.precision", "fp16"], ["sync.warm_start", "5", "fp16", "bf16"]),
        (["--sync.mixing", "1"], ["sync.mixing", "1", "below 1"]),
        (["--sync.max_norm_ratio", "1"], ["sync.max_norm_ratio", "1", "above 1"]),
        (["--sync.timeout_seconds", "0"], ["sync.timeout_seconds", "0", "above 0"]),
        (["--sync.timeout_seconds", "inf"], ["sync.timeout_seconds", "inf", "at most 86400"]),
        (["--outer.lr", "-1"], ["outer.lr", "-1", "above 0"]),
        (["--outer.momentum", "2"], ["outer.momentum", "2", "below 1"]),
        (["--inner.lr", "0"], ["inner.lr", "0", "above 0"]),
        (["--inner.lr", "nan"], ["inner.lr", "nan", "finite"]),
        (["--inner.lr", "inf"], ["inner.lr", "inf", "finite"]),
        (["--inner.weight_decay", "-0.1"], ["inner.weight_decay", "-0.1", "at least 0"]),
        (["--inner.weight_decay", "inf"], ["inner.weight_decay", "inf", "finite"]),
        (["--inner.beta1", "1"], ["inner.beta1", "1", "below 1"]),
        (["--inner.beta2", "-1"], ["inner.beta2", "-1", "at least 0"]),
        (["--inner.warmup_steps", "-1"], ["inner.warmup_steps", "-1", "at least 0"]),
        (["--inner.final_lr_ratio", "1.5"], ["inner.final_lr_ratio", "1.5", "from 0 to 1"]),
        (["--inner.clip_norm", "0"], ["inner.clip_norm", "0", "above 0"]),
        (["--training.batch_size", "0"], ["training.batch_size", "0", "at least 1"]),
        (
            ["--training.batch_size", "8", "--training.accumulation", "3"],
            ["training.batch_size = 8", "training.accumulation = 3", "multiple"],
        ),
        (["--training.eval_interval", "0"], ["training.eval_interval", "0", "at least 1"]),
        (["--training.eval_windows", "0"], ["training.eval_windows", "0", "at least 1"]),
        (["--training.log_interval", "0"], ["training.log_interval", "0", "at least 1"]),
        (["--training.sample_tokens", "-1"], ["training.sample_tokens", "-1", "at least 0"]),
        (["--data.shards", "0"], ["data.shards", "0", "from 1"]),
        (["--data.vocab_size", "10"], ["data.vocab_size", "10", "257"]),
        (["--data.sequence_length", "0"], ["data.sequence_length", "0", "at least 1"]),
        (["--data.validation_fraction", "1"], ["data.validation_fraction", "1", "between 0 and 1"]),
        (["--data.tokenizer", "t.json", "--data.vocab_size", "300"], ["data.vocab_size", "300", "data.tokenizer"]),
        (["--outer.optimizer", "lion"], ["outer.optimizer", "lion", "nesterov"]),
        (["--outer", '{"lr": 3}'], ["--outer", "table", "--outer."]),
        (["--model", "tinny"], ["tinny", "tiny", "presets"]),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_the_value_and_the_rule(
    capsys: pytest.CaptureFixture[str], tokens: list[str], parts: list[str]
) -> None:
    message = complaint(capsys, *tokens)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("steps = 2.5", ["steps", "2.5", "whole number"]),
        ("workers = [1, 2]", ["workers", "[1, 2]"]),
        ("workers = true", ["workers", "true"]),
        ('steps = "many"', ["steps", "many"]),
        ("[sync]\nnum_inner_steps = 0", ["sync.num_inner_steps", "0", "at least 1"]),
        ("steps = = 3", ["run.toml", "TOML"]),
    ],
)
def test_a_run_file_with_a_bad_value_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, parts: list[str]
) -> None:
    message = complaint(capsys, run_file(tmp_path, text))
    for part in parts:
        assert part in message, message


def test_a_run_file_that_is_missing_a_folder_or_not_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "does not exist" in complaint(capsys, tmp_path / "none.toml")
    assert str(tmp_path) in complaint(capsys, tmp_path)
    assert "binary.toml" in complaint(capsys, binary)


def test_a_run_file_after_an_option_is_refused_with_the_right_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_file(tmp_path, "workers = 2")
    assert "must come first" in complaint(capsys, "--workers", "3", file)


# Options without effect


@pytest.mark.parametrize("optimizer", OUTER_NUMBERS)
def test_a_number_that_the_outer_optimizer_does_not_take_is_refused(
    capsys: pytest.CaptureFixture[str], optimizer: str
) -> None:
    for name in sorted(set().union(*OUTER_NUMBERS.values()) - set(OUTER_NUMBERS[optimizer])):
        message = complaint(capsys, "--outer.optimizer", optimizer, f"--outer.{name}", "0.5")
        assert f"outer.{name} = 0.5 has no effect" in message
        assert optimizer in message


@pytest.mark.parametrize(
    "option", ["--outer.lr=0.5", "--outer.optimizer=sgd", "--H=5", "--sync.fragments=2", "--sync.overlap-steps=1"]
)
def test_an_option_without_effect_on_the_baseline_is_refused_on_the_command_line(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    message = complaint(capsys, "--mode", "data-parallel", option)
    assert "has no effect in mode 'data-parallel'" in message


@pytest.mark.parametrize(
    ("switch", "option"),
    [
        ("--checkpoint.interval=0", "--checkpoint.keep=3"),
        ("--checkpoint.interval=0", "--checkpoint.asynchronous=false"),
        ("--training.sample_tokens=0", "--training.sample_prompt=Once"),
    ],
)
def test_an_option_of_what_is_switched_off_is_refused_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], switch: str, option: str
) -> None:
    assert f"{option.partition('=')[0]} has no effect with" in complaint(capsys, switch, option)
    assert run(["train", option, "--print-config"]) == 0
    (tmp_path / "config.toml").write_text(capsys.readouterr().out)  # what an earlier run had is no mistake
    assert run(["train", str(tmp_path / "config.toml"), switch, "--print-config"]) == 0
    capsys.readouterr()
    assert f"{option.partition('=')[0]} has no effect with" in complaint(capsys, f"--resume={tmp_path}", switch, option)


def test_offloading_on_the_cpu_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert "sync.offload = true has no effect with device = cpu" in complaint(capsys, "--sync.offload", "--device=cpu")


def test_a_flag_that_is_neither_true_nor_false_is_refused_as_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--compute.compile maybe: it must be true or false" in complaint(capsys, "--compute.compile", "maybe")


def test_an_option_without_effect_on_the_baseline_is_noted_if_a_shared_run_file_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_file(tmp_path, "[outer]\nlr = 0.5\n[sync]\nnum_inner_steps = 5\ntimeout_seconds = 9.0\n")
    assert run(["train", str(file), "--mode=data-parallel", "--print-config"]) == 0
    note = capsys.readouterr().err
    assert "outer.lr, sync.num_inner_steps" in note
    assert "timeout" not in note
    assert run(["train", str(file), "--print-config"]) == 0
    assert capsys.readouterr().err == ""


def test_no_field_is_left_out_of_the_known_keys() -> None:
    for table, section in sections(RunConfig()).items():
        for field in dataclasses.fields(section):
            if not dataclasses.is_dataclass(getattr(section, field.name)):
                assert (f"{table}.{field.name}" if table else field.name) in known_keys()


def test_a_configuration_cannot_be_edited() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().steps = 3  # type: ignore[misc]
    with pytest.raises(ConfigError):
        dataclasses.replace(RunConfig(), steps=0)


# What follows from a configuration


@pytest.mark.parametrize(
    ("steps", "H", "expected"), [(600, 30, 60), (1000, 500, 500), (20, 30, 30), (88_000, 500, 9000), (100, 1, 10)]
)
def test_evaluations_are_about_ten_and_at_ends_of_rounds(steps: int, H: int, expected: int) -> None:
    config = RunConfig(steps=steps, sync=SyncConfig(num_inner_steps=H))
    assert config.eval_interval == expected
    assert config.eval_interval % H == 0


def test_train_without_any_option_is_the_recipe_of_the_small_model() -> None:
    tokens, notes = merge([])
    assert "--steps=800" in tokens and "--sync.num_inner_steps=15" in tokens
    assert notes == []


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--H=15", "sync.num_inner_steps"),
        ("--H=30", "sync.num_inner_steps"),
        ("--codec=fp16", "sync.codec"),
        ("--sync.warm_start=0", "sync.warm_start"),
        ("--outer.momentum=0.9", "outer.momentum"),
        ("--outer.lr=0.5", "outer.lr"),
        ("--sync.fragments=2", "sync.fragments"),
    ],
)
def test_an_option_changes_what_it_names_and_nothing_else(option: str, key: str, tmp_path: Path) -> None:
    default, given = resolved().values(), resolved(option).values()
    assert {name for name in default if default[name] != given[name]} <= {key}
    assert str(given[key]) == option.partition("=")[2]
    table, _, name = key.rpartition(".")
    value = option.partition("=")[2]
    file = run_file(tmp_path, f"[{table}]\n{name} = {value if value[0].isdigit() else repr(value)}\n")
    assert resolved(file).values() == given, "a run file is no different"


def test_a_recipe_has_a_name_and_says_what_it_decides() -> None:
    def recipe(*tokens: str) -> tuple[object, ...]:
        values = resolved(*tokens).values()
        names = ("recipe", "sync.warm_start", "sync.num_inner_steps", "sync.codec", "outer.momentum")
        return tuple(values[name] for name in names)

    assert recipe() == recipe("--recipe=warm") == ("warm", 200, 15, "int4", 0.8)
    assert recipe("--steps=2000") == ("warm", 500, 15, "int4", 0.8)
    assert recipe("--recipe=plain") == ("plain", 0, 30, "fp16", 0.5)
    assert recipe("--recipe", "paper") == ("paper", 0, 500, "fp16", None)
    assert recipe("--recipe=warm", "--engine=swarm")[:2] == ("warm", 200)
    line = recipe_line(resolved("--H=30"))
    assert line.startswith("recipe warm: ") and "; given: H 30 (--recipe plain or paper" in line
    assert (
        "sync.warm_start 200" in line and "codec int4" in line and "outer.momentum 0.8" in line and "H 15" not in line
    )


def test_the_recipe_paper_says_which_numbers_apply() -> None:
    assert recipe_line(resolved("--recipe=paper", "--model=150m", "--steps=40")).startswith(
        "recipe paper: inner.lr 0.0004, inner.warmup_steps 1000, outer.optimizer nesterov, outer.lr 0.7, "
        "outer.momentum 0.9, H 500, codec fp16, data.vocab_size 32000, data.sequence_length 1024, "
        "training.batch_size 512; given: steps 40 (--recipe plain for other defaults"
    )
    line = recipe_line(resolved("--recipe=paper", "--outer.optimizer=sgd"))
    assert "outer.lr 1.0, H 500" in line and "momentum" not in line and "; given: outer.optimizer sgd (" in line


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        ["--recipe=paper"],
        ["--mode=data-parallel"],
        ["--mode=data-parallel", "--recipe=paper"],
        ["--engine=swarm"],
        ["--ranks=2"],
        ["--compute.precision=fp16"],
        ["--sync.asynchronous=true"],
        ["--model=60m"],
    ],
    ids=" ".join,
)
def test_each_recipe_that_the_line_offers_can_be_chosen(tokens: list[str]) -> None:
    offered = re.search(r"\(--recipe (.+) for other defaults", recipe_line(resolved(*tokens)))
    assert offered is not None
    for name in offered[1].split(" or "):
        chosen = resolved(*(token for token in tokens if "recipe" not in token), f"--recipe={name}")
        assert chosen.recipe == name


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["--engine=swarm"], "in a swarm the others would wait"),
        (["--mode=data-parallel"], "mode = data-parallel averages at every step"),
        (["--ranks=2"], "ranks = 2 has no warm start"),
        (["--compute.precision=fp16"], "compute.precision = fp16 has no warm start"),
        (["--sync.asynchronous=true"], "sync.asynchronous has no warm start"),
    ],
)
def test_where_a_warm_start_is_impossible_the_recipe_is_another_and_says_why(tokens: list[str], reason: str) -> None:
    config = resolved(*tokens)
    assert config.recipe == "plain" and config.sync.warm_start == 0
    assert recipe_line(config).startswith(f"recipe plain ({reason}")


def test_a_recipe_that_does_not_fit_is_refused_or_if_a_run_file_has_it_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "must be one of warm, plain, paper" in complaint(capsys, "--recipe=hot")
    assert "numbers of the model tiny, and model = 60m" in complaint(capsys, "--recipe=warm", "--model=60m")
    assert "no effect in mode 'data-parallel'" in complaint(capsys, "--recipe=warm", "--mode=data-parallel")
    file = run_file(tmp_path, 'recipe = "warm"')
    tokens, notes = merge([str(file), "--model=60m"])
    assert "--recipe=plain" in tokens and "the run file's recipe is not used" in notes[0]


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (None, "def "),
        ("stdlib", "def "),
        ("program.py", "def "),
        ("code", "def "),
        ("texts", ""),
        ("book.txt", ""),
        ("hf:roneneldan/TinyStories", ""),
    ],
)
def test_the_prompt_of_the_sample_fits_the_text(
    source: str | None, prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("code/a.py", "code/b.py", "code/README.md", "code/__pycache__/a.pyc", "texts/a.txt", "texts/b.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    given = [] if source is None else [f"--data.source={source}"]
    assert resolved(*given).training.sample_prompt == prompt
    assert resolved(*given, "--training.sample_prompt=Once").training.sample_prompt == "Once"


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["--engine=bucket"], "needs the place where the workers meet"),
        (["--bucket=s3://a/b"], "is where the workers of engine = bucket meet"),
        (["--engine=bucket", "--bucket=a/b"], "must be s3://BUCKET/RUN"),
        (["--engine=bucket", "--bucket=s3://a/b", "--port=4000"], "port = 4000 has no effect with engine = bucket"),
        (["--engine=bucket", "--bucket=s3://a/b", "--swarm.quorum=any"], "swarm.quorum = any is for engine = swarm"),
        (["--engine=bucket", "--bucket=s3://a/b", "--ranks=2"], "with engine = bucket a worker has one rank"),
        (["--engine=bucket", "--bucket=s3://a/b", "--mode=data-parallel"], "leave out engine = bucket"),
    ],
)
def test_options_that_do_not_fit_a_bucket_are_refused_with_the_reason(
    tokens: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in complaint(capsys, *tokens)


def test_a_run_in_a_bucket_begins_with_one_worker_and_its_run_file_gives_it_again(tmp_path: Path) -> None:
    config = resolved("--engine=bucket", "--bucket=s3://a/b", "--swarm.min_workers=2")
    assert config.workers == 1 and config.elastic
    assert resolved(str(run_file(tmp_path, to_toml(config)))) == config
