"""`diloco join -` and `diloco join URL`: the command lines of training/processes/swarm_start.py and bucket_start.py."""

import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.cli.config_parser import parse_config
from diloco.cli.display.live import PipeSafeConsole
from diloco.cli.display.run_display import RunDisplay, print_end
from diloco.cli.runs.ended_run import folder_of, folder_with, summary_of
from diloco.errors import ConfigError, Excluded, RendezvousError, RunComplete
from diloco.own_command import command
from diloco.sinks.registry import check_installed
from diloco.swarm.installed import check_swarm
from diloco.training.config.run import RunConfig, is_shared
from diloco.training.config.run_file import did_you_mean, known_keys, options
from diloco.training.processes.swarm_start import SWARM_TEXT, describe_run, join_run
from diloco.training.records.run_description import RunDescription
from diloco.training.records.run_folder import resume_command

if TYPE_CHECKING:
    from diloco.swarm.trust.invitation import Invitation

_HELP = """\
[bold]diloco join[/] - | @FILE | URL \\[OPTIONS]

Join a run that was begun with `diloco train --engine bucket`, at any time: URL
is the place of its bucket (s3://NAME/RUN, gs://NAME/RUN, az://NAME/RUN or
file:///FOLDER/RUN), and --workers N how many of this machine join (default 1).

Join a run that was begun with `diloco train --engine swarm`, at any time. The
invitation is read from standard input (-), from a file (@FILE), or without
either from the variable DILOCO_INVITATION; an argument could be read by other
users of this machine. Each worker needs an invitation of its own: several words
in the file are as many workers.

The configuration, the tokenizer, a share of the text and the state of training
come from the others; only what concerns this machine is decided here:

  --device D            auto (default), cpu, cuda
  --ranks R             processes of each worker, a device each (1)
  --threads N           CPU threads of each worker
  --out RUNDIR          the run folder (default runs/<date>-<model>)
  --data.source X       read this text instead of a share of the swarm's
  --model M             if the run is not of a preset: the same model, here
  --port N, --host A    where to listen (default: any free port, all addresses)
  --announce A          what others should call: HOST, HOST:PORT or a multiaddr
  --sinks S             also write to tensorboard, wandb, trackio (with commas)
  --dashboard PORT      show the run in the browser while it trains
  --estimate            show memory, disk and bytes that this takes, and end
                        (--bandwidth 100mbit: at that rate; --json)

and --compute.*, --checkpoint.*, --data.cache_dir, --training.accumulation. Ctrl-C
leaves; the others train on. To come back: diloco train --resume RUNDIR.

Example:  diloco join @invitations.txt --device cuda"""


def join(
    *given: Annotated[str, Parameter(allow_leading_hyphen=True)],
    help_join: Annotated[bool, Parameter(name="--help-join")] = False,
) -> None:
    """Join a run of a swarm."""
    console = PipeSafeConsole()
    if help_join:
        console.print(_HELP, highlight=False)
        return
    sources = list(takewhile(lambda token: not token.startswith("--"), given))
    if any("://" in source for source in sources):
        _join_bucket(console, sources, given[len(sources) :])
        return
    check_swarm()
    asked, rest = estimate_options(given[len(sources) :])
    tokens = check_own_options(rest)
    from diloco.swarm.trust.invitation import is_word, read_invitations

    def configure(description: RunDescription) -> RunConfig:
        config = joined_config(description, tokens, len(invitations))
        check_seats(config.workers, len(invitations))
        check_installed(config.sink_names)
        return config

    def observe(config: RunConfig, members: int) -> RunDisplay:
        _print_swarm(console, config, members)
        return RunDisplay(console, config)

    invitations = read_invitations(sources, time.time())
    if any(map(is_word, sources)):
        shown = "note: other users of this machine can read an argument: give the invitation with - or @FILE"
        Console(stderr=True).print(Text(shown, style="yellow"), soft_wrap=True)
    _check_unused(invitations)
    if "estimate" in asked:
        from diloco.cli.estimate import print_estimate

        config, vocab_size, members = describe_run(invitations[0], configure)
        print_estimate(
            console,
            config,
            bandwidth=asked.get("bandwidth"),
            as_json="json" in asked,
            vocab_size=vocab_size,
            members=members,
        )
        return
    try:
        ended = join_run(invitations, configure, observe)
    except RunComplete as complete:
        console.print(Text(str(complete)), soft_wrap=True)
    except Excluded:
        raise
    except RendezvousError as error:
        _print_known_end(console, folder_of(invitations[0]), error)
    else:
        print_end(console, ended)


def _join_bucket(console: Console, sources: Sequence[str], given: Sequence[str]) -> None:
    """Join the run in a bucket."""
    if len(sources) != 1:
        raise ConfigError(f"{len(sources)} places are given: a machine joins one run at a time")
    url = sources[0]
    asked, rest = estimate_options(given)
    if asked:
        raise ConfigError("--estimate is for an invitation: in a bucket, the machine that began the run has it")
    tokens = check_own_options(rest)
    from diloco.training.processes.bucket_start import join_bucket

    def configure(description: RunDescription) -> RunConfig:
        config = joined_config(description, [*tokens, f"--bucket={url}"])
        check_installed(config.sink_names)
        return config

    def observe(config: RunConfig, members: int) -> RunDisplay:
        _print_swarm(console, config, members)
        return RunDisplay(console, config)

    try:
        ended = join_bucket(url, configure, observe)
    except RunComplete as complete:
        console.print(Text(str(complete)), soft_wrap=True)
    else:
        print_end(console, ended)


def estimate_options(given: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Separate --estimate, --bandwidth and --json with their values from all other options."""
    asked: dict[str, str] = {}
    rest = list(given)
    for name in ("estimate", "json"):
        if f"--{name}" in rest:
            rest.remove(f"--{name}")
            asked[name] = ""
    for index, token in enumerate(rest):
        name, equals, value = token.partition("=")
        if name == "--bandwidth":
            asked["bandwidth"] = value if equals else "".join(rest[index + 1 : index + 2])
            del rest[index : index + (1 if equals else 2)]
            break
    if asked and "estimate" not in asked:
        raise ConfigError(f"--{next(iter(asked))} has an effect with --estimate only: add it")
    return asked, tuple(rest)


def _print_known_end(console: Console, folder: Path | None, error: RendezvousError) -> None:
    """Say how the run ended where no worker answers: if a folder of the run is here and says that it is complete, that
    is the answer."""
    summary = summary_of(folder)
    if folder is None or summary is None or summary["status"] != "complete":
        raise error
    steps = summary["inner_steps"]
    console.print(
        Text(f"the run is complete after {steps:,} steps ({folder}): there is nothing left to join"), soft_wrap=True
    )


def check_own_options(given: Sequence[str]) -> list[str]:
    """Return the options of this machine, as the parser takes them; refuses those that the swarm decides."""
    tokens, named = options(given)
    for name in named:
        if name not in known_keys():
            more = did_you_mean(name) or f": see {command('join', '--help')}"
            raise ConfigError(f"--{name} is not an option of diloco join{more}")
        if is_shared(name):
            raise ConfigError(f"--{name} is the same for all members of a swarm, and comes from it: leave it out")
    return tokens


def check_seats(workers: int, invitations: int) -> None:
    """Raise ConfigError unless each worker has an invitation."""
    if workers != invitations:
        have = "1 invitation is" if invitations == 1 else f"{invitations} invitations are"
        raise ConfigError(
            f"--workers {workers}, and {have} given: each worker needs its own. `{command('invite', 'RUN')} --seats "
            f"{workers}`, on the machine where the run began, prints {workers}; give them all, in a file, say: "
            f"`{command('join', '@FILE')}`"
        )


def _check_unused(invitations: "list[Invitation]") -> None:
    """Raise ConfigError if a run folder of this machine has one of them: its worker has the seat."""
    for invitation in invitations:
        folder = folder_with(invitation)
        summary = summary_of(folder)
        if folder is not None and (summary is None or summary["status"] != "complete"):
            raise ConfigError(
                f"the invitation {invitation.id} was used here, by {folder}: continue there "
                f"({resume_command(folder)}), or ask for another one ({command('invite', 'RUN')}): each is for one "
                "worker"
            )


def joined_config(description: RunDescription, tokens: list[str], workers: int = 1) -> RunConfig:
    """Put the swarm's options and this machine's into one configuration, validated like a run file's.

    `workers`: the default of this machine, the number of its invitations.
    """
    given = options(tokens)[1]
    if description.model is None and "model.name" not in given:
        raise ConfigError("this run is of a model that is not a preset: name the same model here, with --model")
    if description.model is not None and given.get("model.name", description.model) != description.model:
        raise ConfigError(f"--model {given['model.name']}: this run is of the model {description.model}; leave it out")
    default = {"workers": str(workers), "data.source": SWARM_TEXT}
    if description.sample_prompt and given.get("training.sample_tokens") != "0":
        default["training.sample_prompt"] = description.sample_prompt
    if description.model is not None:
        default["model.name"] = description.model
    defaults = [f"--{key}={value}" for key, value in default.items() if key not in given]
    return parse_config(options([*description.tokens(), *defaults, *tokens])[0])


def _print_swarm(console: Console, config: RunConfig, members: int) -> None:
    sync = config.sync
    what = f"{config.model}, {config.steps} inner steps, H = {sync.num_inner_steps}, {sync.codec}"
    there = "1 worker is" if members == 1 else f"{members} workers are"
    name = "the swarm" if config.bucket is None else config.bucket
    console.print(Text(f"{name}: {what}; {there} there"), soft_wrap=True)
