"""`diloco`: parse, build, call. Verbs are imported when they are used, so that `diloco --help` is quick."""

import os
import select
import sys
from typing import NoReturn

from cyclopts import App
from cyclopts.exceptions import CoercionError, CycloptsError, UnknownOptionError
from rich.console import Console
from rich.text import Text

from diloco import own_command
from diloco.cli.config_parser import PARAMETER
from diloco.errors import ConfigError, DiLoCoError, WorkerFailed
from diloco.training.config.run_file import did_you_mean, merge
from diloco.version import __version__

app = App(
    name="diloco",
    help="Train one language model together on machines that are far apart.",
    help_epilogue="Example:  diloco train --workers 2",
    version=__version__,
    default_parameter=PARAMETER,
    suppress_keyboard_interrupt=False,  # exit code 1, as below
)
app.command("diloco.cli.train:train", name="train", help="Train a model with DiLoCo, or data-parallel as a baseline.")
app.command("diloco.cli.join:join", name="join", help="Join a run of a swarm, with an invitation.")
app.command(
    "diloco.cli.runs.status:status",
    name="status",
    help="Show the workers of a swarm, and how far each is.",
    help_epilogue="Example:  diloco status runs/mine --watch",
)
app.command(
    "diloco.cli.runs.compare:compare",
    name="compare",
    help="Put runs side by side in one table.",
    help_epilogue="Example:  diloco compare runs/diloco runs/data-parallel",
)
app.command(
    "diloco.cli.runs.dashboard:dashboard",
    name="dashboard",
    help="Show runs in the browser, live or afterwards.",
    help_epilogue="Example:  diloco dashboard runs/mine --port 8420",
)
app.command(
    "diloco.cli.runs.plot:plot",
    name="plot",
    help="Draw runs: loss, rounds, utilisation; as SVG, PNG, PDF or HTML.",
    help_epilogue="Example:  diloco plot runs/mine runs/other --out loss.pdf --panels steps,tokens",
)
app.command(
    "diloco.cli.runs.generate:generate",
    name="generate",
    help="Continue a prompt; a chat model answers it.",
    help_epilogue='Example:  diloco generate runs/mine "Once upon a time" --max-tokens 100 --seed 1',
)
app.command(
    "diloco.cli.runs.generate:chat",
    name="chat",
    help="Talk with a model that has a chat template.",
    help_epilogue='Example:  diloco chat runs/mine --system "You are brief."',
)
app.command(
    "diloco.cli.runs.export:export",
    name="export",
    help="Write a run's model as a folder that transformers loads.",
    help_epilogue="Example:  diloco export runs/mine --to my-model --dtype bfloat16",
)
app.command(
    "diloco.cli.sink:sink",
    name="sink",
    help="Write a run to TensorBoard, W&B or trackio, also after the fact.",
    help_epilogue="Example:  diloco sink runs/2026-01-31-101500-tiny tensorboard",
)
app.command(
    "diloco.cli.invite:invite",
    name="invite",
    help="Print invitations to a swarm's run, each for one worker.",
    help_epilogue="Example:  diloco invite runs/mine --seats 4 --days 7",
)
app.command(
    "diloco.cli.invite:revoke",
    name="revoke",
    help="Take a peer out of a swarm's run, for ever.",
    help_epilogue="Example:  diloco revoke runs/mine 3",
)
app.command(
    "diloco.cli.doctor:doctor",
    name="doctor",
    help="Check whether this machine can be in a swarm, and how well.",
    help_epilogue="Example:  diloco doctor - --port 4000",
)
data = App(
    name="data",
    help="Prepare text for training.",
    help_epilogue="Example:  diloco data prepare --data.source my_texts/",
)
data.command("diloco.cli.data:prepare", name="prepare", help="Turn text into token shards, once; resumes.")
data.command("diloco.cli.data:tokenizer", name="tokenizer", help="Train a tokenizer and keep it.")
data.command(
    "diloco.cli.data:list_cache",
    name="list",
    help="List the prepared corpora in the cache, with their sizes.",
    help_epilogue="Example:  diloco data list",
)
data.command(
    "diloco.cli.data:clear",
    name="clear",
    help="Delete prepared corpora that no run uses.",
    help_epilogue="Example:  diloco data clear --all",
)
app.command(data)
lab = App(
    name="lab",
    help="Rerun the papers' experiments on one device, or your own.",
    help_epilogue="Example:  diloco lab run t2 f4 --scale cpu",
)
lab.command(
    "diloco.cli.lab:list_experiments",
    name="list",
    help="List the experiments.",
    help_epilogue="Example:  diloco lab list --scale gpu",
)
lab.command(
    "diloco.cli.lab:run",
    name="run",
    help="Run arms that are not finished; the same command continues.",
    help_epilogue="Example:  diloco lab run --all --scale smoke --seeds 1",
)
lab.command(
    "diloco.cli.lab:tune",
    name="tune",
    help="Find the best rates of an experiment's arms.",
    help_epilogue="Example:  diloco lab tune t2 --scale cpu",
)
lab.command(
    "diloco.cli.lab:report",
    name="report",
    help="Write tables, figures and verdicts as HTML and Markdown.",
    help_epilogue="Example:  diloco lab report runs/lab-cpu",
)
lab.command(
    "diloco.cli.lab:new",
    name="new",
    help="Write an experiment of your own, ready to run.",
    help_epilogue="Example:  diloco lab new my_idea",
)
app.command(lab)


def main() -> NoReturn:
    """Run the command line and exit: code 0 if it is done, 1 if it failed, 2 for bad usage or configuration."""
    own_command.remember(sys.argv[0])
    try:
        exit_code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python can flush at exit
        exit_code = 1
    sys.exit(exit_code)


def _output_is_closed() -> bool:
    """Return whether nothing reads the output any more, as in `diloco … | head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors and hang-ups alone
    return bool(output.poll(0))


def run(tokens: list[str]) -> int:
    console = Console(stderr=True)
    try:
        if tokens[:1] == ["train"]:
            tokens = _train_tokens(tokens[1:], console)
        elif tokens[:1] == ["join"] and {"--help", "-h"} & set(tokens):
            tokens = ["join", "--help-join"]
        elif tokens[:2] in (["data", "prepare"], ["data", "tokenizer"]):
            tokens = _data_tokens(tokens[1], tokens[2:], console)
        app(_spelled(tokens), exit_on_error=False, print_error=False, result_action="return_value")
    except UnknownOptionError as error:
        _complain(console, _unknown_option(tokens, error))
        return 2
    except CoercionError as error:
        _complain(console, _no_number(error))
        return 2
    except (CycloptsError, ConfigError) as error:
        _complain(console, str(error))
        return 2
    except DiLoCoError as error:
        if isinstance(error, WorkerFailed) and error.output:
            console.print(Text(error.output.rstrip(), style="dim"), soft_wrap=True)
        _complain(console, str(error))
        return 1
    except KeyboardInterrupt:
        _complain(console, "interrupted")
        return 1
    return 0


def _spelled(tokens: list[str]) -> list[str]:
    """Spell options as they are declared: `--save_seconds` is `--save-seconds`, and the other way round."""
    words, apps, _ = app.parse_commands(tokens)
    verb = apps[-1]
    if not words or words[-1].startswith("-") or verb.default_command is None:  # --help and --version are none of ours
        return tokens
    names = [name for argument in verb.assemble_argument_collection() for name in argument.names]
    spelling = {name.replace("_", "-"): name for name in names if name.startswith("--")}
    end = tokens.index("--") if "--" in tokens else len(tokens)
    spelled = []
    for token in tokens[:end]:
        name, equals, value = token.partition("=")
        known = spelling.get(name.replace("_", "-"), name) if token.startswith("--") else name
        spelled.append(f"{name if name in names else known}{equals}{value}")
    return spelled + tokens[end:]


def _train_tokens(tokens: list[str], console: Console) -> list[str]:
    if "--help" in tokens or "-h" in tokens:
        return ["train", "--help-train"]
    return ["train", *_merged(tokens, console)]


def _data_tokens(command: str, tokens: list[str], console: Console) -> list[str]:
    from diloco.cli.data import check_options

    if "--help" in tokens or "-h" in tokens:
        return ["data", command, "--help-data"]
    check_options(command, tokens)
    return ["data", command, *_merged(tokens, console)]


def _merged(tokens: list[str], console: Console) -> list[str]:
    merged, notes = merge(tokens)
    for note in notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    return merged


def _unknown_option(tokens: list[str], error: UnknownOptionError) -> str:
    """Name the option that may be meant, for verbs with the options of a run."""
    name = (error.token.keyword or error.token.value).partition("=")[0]
    meant = did_you_mean(name.lstrip("-")) if tokens[:1] in (["train"], ["data"]) else ""
    return f"unknown option {name}{meant}" if meant else str(error)


def _no_number(error: CoercionError) -> str:
    """Say what an option must be whose value is of another kind."""
    kind = {int: "a whole number", float: "a number"}.get(error.target_type or str)
    if kind is None or error.token is None or error.token.keyword is None:
        return str(error)
    name = error.token.keyword.removeprefix("--").replace("-", "_")
    return f"--{name} {error.token.value}: it must be {kind}"


def _complain(console: Console, message: str) -> None:
    console.print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)


if __name__ == "__main__":
    main()
