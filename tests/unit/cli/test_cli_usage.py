"""`diloco` in this process: help that fits a screen, and bad input that ends with one message and no traces."""

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import diloco
from diloco.cli import main
from diloco.cli.main import run
from diloco.errors import install_hint
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.processes.start import device_note
from diloco.training.records.summary import write_summary
from support.train_runs import tiny_options, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("usage") / "text.txt", lines=600)


def refused(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    """The one message of a refused command."""
    assert run(list(tokens)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.out + captured.err
    return captured.err


# Help


@pytest.mark.parametrize(
    "tokens",
    [["--help"], ["train", "--help"], ["compare", "--help"], ["sink", "--help"], ["train", "-h"], [],
     ["invite", "--help"], ["revoke", "--help"], ["doctor", "--help"]],
)  # fmt: skip
def test_help_fits_a_screen_and_has_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tokens: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(tokens) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(len(line) for line in lines) <= 80
    verb = tokens[0] if tokens and not tokens[0].startswith("-") else "train"
    assert any("Example" in line and f"diloco {verb}" in line for line in lines), "\n".join(lines)


def test_no_line_of_trains_help_is_wrapped_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        run(["train", "--help"])
        shown.append([line.rstrip() for line in capsys.readouterr().out.splitlines()])
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    "tokens",
    [["--help"], ["train", "--help"], ["train", "--print-config"], ["compare", "--help"], ["invite", "--help"]],
)
def test_help_and_the_configuration_need_no_torch(tokens: list[str]) -> None:
    program = (
        f"import sys; from diloco.cli.main import run; code = run({tokens!r}); "
        "sys.exit(code or (3 if 'torch' in sys.modules else 0))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    from diloco import __version__

    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


# Bad input: nothing is started, nothing is written


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--worker=2"], ["--worker", "--workers"]),
        (["--H=0"], ["sync.num_inner_steps", "0", "at least 1"]),
        (["--H=x"], ["--sync.num_inner_steps x: it must be a whole number"]),
        (["--outer.lr=high"], ["--outer.lr high: it must be a number"]),
        (["--workers=5"], ["5 workers", "4 shards", "--data.shards"]),
        (["--data.source=/no/such/text"], ["/no/such/text", "no such file or folder"]),
        (["--data.tokenizer=/no/such.json", "--data.vocab_size=2048"], ["/no/such.json", "cannot be read"]),
        (["--training.batch_size=100000"], ["less than one batch of 100000", "give more text"]),
        (["--data.sequence_length=1000000"], ["data.sequence_length"]),
        (["--model=large"], ["large", "presets are"]),
    ],
)
def test_bad_input_is_refused_with_one_message_and_no_run_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path, options: list[str], parts: list[str]
) -> None:
    names = {option.partition("=")[0] for option in options}
    usual = [option for option in tiny_options(text) if option.partition("=")[0] not in names]
    message = refused(capsys, "train", *usual, f"--out={tmp_path / 'run'}", *options)
    for part in parts:
        assert part in message, message
    assert not (tmp_path / "run").exists()


def test_an_empty_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    message = refused(capsys, "train", *tiny_options(tmp_path / "empty.txt"), f"--out={tmp_path / 'run'}")
    assert "too little" in message
    assert not (tmp_path / "run").exists()


def test_an_existing_folder_with_something_in_it_is_not_written_into(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    (tmp_path / "mine").write_text("precious")
    message = refused(capsys, "train", *tiny_options(text), f"--out={tmp_path}")
    assert str(tmp_path) in message and "not an empty folder" in message
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_folder_that_is_a_file_or_lies_below_one_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    (tmp_path / "file").write_text("precious")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        assert str(out) in refused(capsys, "train", *tiny_options(text), f"--out={out}")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_run_folder_that_may_not_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    tmp_path.chmod(0o500)
    out = Path("/proc/run") if os.geteuid() == 0 else tmp_path / "run"  # root may write into any folder of a disk
    try:
        message = refused(capsys, "train", *tiny_options(text), f"--out={out}")
    finally:
        tmp_path.chmod(0o700)
    assert f"the run folder {out} cannot be written" in message
    assert "--out" in message


def test_an_error_with_brackets_is_printed_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "[red]x :smile:"
    assert f"{out}" in refused(capsys, "compare", str(out), str(out))


def test_an_unknown_verb_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "trane" in refused(capsys, "trane")


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_under_torchrun_only_the_first_says_that_a_run_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: str, lines: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = RunConfig(steps=30)
    (tmp_path / "config.toml").write_text(to_toml(config))
    write_summary(tmp_path, config)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "complete", "inner_steps": 30}))
    assert run(["train", "--resume", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("is complete with 30 steps") == lines


def test_a_gpu_that_is_not_there_is_told_before_there_is_a_folder(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "run"
    options = [*tiny_options(text), f"--out={out}"]
    options.remove("--device=cpu")
    for engine in ("torch_distributed", "swarm"):
        said = refused(capsys, "train", *options, "--device=cuda", f"--engine={engine}")
        assert "device = cuda, but this machine has no CUDA device" in said and "--device cpu" in said
    assert not out.exists()


def test_an_apple_gpu_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('device = "mps"')
    for tokens in (["--device", "mps"], ["--device=mps"], [str(tmp_path / "run.toml")]):
        assert "Apple GPUs are not supported, since" in refused(capsys, "train", *tokens)


def test_an_apple_gpu_that_is_not_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert "the CPU" in (device_note(RunConfig()) or "")
    assert device_note(RunConfig(device="cpu")) is None
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert device_note(RunConfig()) is None


def test_make_alone_lists_the_targets_and_starts_nothing() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(["make"], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for target in ("train", "swarm", "test", "check"):
        assert f"  {target} " in done.stdout


def test_make_swarm_runs_for_long_unless_it_is_told_otherwise() -> None:
    root = Path(__file__).parents[3]

    def planned(*arguments: str) -> str:
        command = ["make", "-n", "-o", ".venv/.swarm", "swarm", *arguments]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60).stdout

    assert "--engine swarm --steps 20000" in planned()
    assert "20000" not in planned("ARGS=--steps 50") and "--steps 50" in planned("ARGS=--steps 50")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["lab", "run", "t2", "--save{}seconds=-3"], "--save-seconds -3.0 must be at least 0"),
        (["generate", "nowhere", "x", "--max{}tokens", "7"], "nowhere"),
        (["export", "nowhere", "--to", "y", "--max{}shard{}size=1GB"], "nowhere"),
        (["train", "--training.batch{}size=0"], "training.batch_size = 0 must be at least 1"),
        (["data", "list", "--data.cache{}dir=/dev/null/x", "--unknown{}option"], "nknown option"),
    ],
)
def test_every_option_may_be_written_with_dashes_or_underscores(
    tokens: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = {refused(capsys, *(token.format(*[mark] * 2) for token in tokens)).replace("_", "-") for mark in "-_"}
    assert len(messages) == 1 and said.replace("_", "-") in messages.pop()


def test_a_missing_extra_is_installed_from_the_index_unless_this_is_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_hint("swarm").startswith("in a clone of diloco, ") and "-e '.[swarm]'" in install_hint("swarm")
    monkeypatch.setattr(
        "diloco.errors._CLONE", tmp_path
    )  # site-packages has neither pyproject.toml nor constraints.txt
    assert install_hint("swarm") == f"{shlex.quote(sys.executable)} -m pip install 'diloco[swarm]'"


def test_dir_lists_the_api_before_anything_is_imported() -> None:
    shown = "import diloco; print([name for name in dir(diloco) if not name.startswith('_')])"
    listed = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True).stdout
    assert set(ast.literal_eval(listed)) == set(diloco.__all__) - {"__version__"}


@pytest.mark.parametrize("flush", [True, False], ids=["at once", "at the end"])
def test_output_that_nobody_reads_any_more_ends_the_command_without_a_trace(flush: bool) -> None:
    program = f"from diloco.cli import main; main.run = lambda tokens: print('x', flush={flush}) or 0; main.main()"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert ended.stderr == b"" and ended.returncode == 1


def test_a_pipe_that_breaks_elsewhere_is_not_taken_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(main, "run", broken)
    with pytest.raises(BrokenPipeError):
        main.main()
