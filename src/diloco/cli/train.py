"""`diloco train`: a run with this machine's workers, or this process's rank of a run under torchrun."""

import os
from pathlib import Path
from typing import Annotated

import docstring_parser
from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.cli.display.live import PipeSafeConsole
from diloco.cli.display.run_display import RunDisplay, print_end
from diloco.errors import ConfigError
from diloco.own_command import command
from diloco.sinks.registry import check_installed
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import dotted, recipe_line, sections, to_toml
from diloco.training.processes.start import FixedWorkers, WayToStart, completed_steps, start_run
from diloco.training.processes.swarm_start import SwarmFounder

_HELP = """\
[bold]diloco train[/] \\[RUN.toml] \\[OPTIONS]

Train a language model with DiLoCo: workers train independently
and average from time to time.

  --model M             tiny (default), 60m, 150m, 400m, llama-150m, llama-1b;
                        a folder (Llama family); hf:NAME_OR_PATH (any causal LM)
  --lora [RANK]         train adapters of this rank (16) in an hf: model
  --workers N           workers on this machine (default 2; 1 in a swarm)
  --ranks R             processes of each worker, a device each: 1 (default), 4,
                        or one number for each worker: 1,2
  --steps N             inner steps of each worker
  --H N                 inner steps between two rounds (sync.num_inner_steps)
  --codec C             fp32, fp16, bf16, int8, int4, e3m0, 2bit, topk
  --recipe R            the defaults of what is not given, told at the start:
                        warm (of tiny: the first quarter of the steps data-
                        parallel, then H 15, int4, outer.momentum 0.8),
                        plain (of the others; tiny: H 30, fp16, 0.5), paper
  --data.source X       stdlib (Python's own library), a file or folder, hf:NAME
  --mode M              diloco (default), or data-parallel: the baseline
  --engine E            torch_distributed (default); swarm, bucket: others can
                        join (--bucket s3://NAME/RUN, gs://…, file:///FOLDER)
  --seed N              seed for the initial parameters and the order of
                        the data
  --out RUNDIR          the run folder (default runs/<date>-<model>)
  --resume RUNDIR       continue a run that was stopped, killed, or has ended
  --device D            auto (default), cpu, cuda
  --sinks S             also write to tensorboard, wandb, trackio (with commas)
  --dashboard PORT      show the run in the browser while it trains
  --print-config        show every option with its value and meaning, and end
  --estimate            show memory, disk and bytes that this run takes, and end
                        (--bandwidth 100mbit: at that rate; --json)

Every key of a run file is an option too: lr under \\[outer] is --outer.lr.
Under torchrun this process is one rank, and the environment says which.

Example:  diloco train --workers 4 --H 50 --outer.lr 0.5
          torchrun --nproc-per-node 2 -m diloco train --steps 600"""


def train(
    file: Path | None = None,
    /,
    *,
    config: Annotated[RunConfig, Parameter(name="*")] = RunConfig(),  # noqa: B008 - frozen
    print_config: Annotated[bool, Parameter(name="--print-config")] = False,
    resume: Annotated[Path | None, Parameter(name="--resume")] = None,
    estimate: Annotated[bool, Parameter(name="--estimate")] = False,
    bandwidth: Annotated[str | None, Parameter(name="--bandwidth")] = None,
    json: Annotated[bool, Parameter(name="--json")] = False,
    help_train: Annotated[bool, Parameter(name="--help-train")] = False,
) -> None:
    """Train a model with DiLoCo, or data-parallel as a baseline."""
    console = PipeSafeConsole()
    if help_train:
        console.print(_HELP, highlight=False)
    elif file is not None:
        raise ConfigError(f"the run file {file} must come first: {command('train', str(file), 'OPTIONS')}")
    elif print_config:
        head = "" if resume is not None else f"# {recipe_line(config)}\n"
        console.print(Text(head + to_toml(config, _comments(config))), soft_wrap=True, end="")
    elif estimate:
        from diloco.cli.estimate import print_estimate

        print_estimate(console, config, resume=resume, bandwidth=bandwidth, as_json=json)
    elif bandwidth is not None or json:
        raise ConfigError(f"{'--json' if json else '--bandwidth'} has an effect with --estimate only: add it")
    else:
        _train(config, resume, console)


def _train(config: RunConfig, resume: Path | None, console: Console) -> None:
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    if torchrun and config.engine == "bucket":
        raise ConfigError("engine = bucket under torchrun: each of its workers is on its own; start it with --workers")
    if torchrun and config.engine == "swarm":
        raise ConfigError(
            "engine = swarm under torchrun: diloco starts the processes of a swarm's workers itself; give --ranks and "
            "--workers instead. (Several machines as one worker: a loop of your own with diloco.join_swarm(ranks=...))"
        )
    if torchrun:
        console.quiet = os.environ.get("RANK") != "0"  # rank 0 prints for all
    if not console.quiet:
        check_installed(config.sink_names)
    if resume is not None and (steps := completed_steps(resume, config)) is not None:
        message = f"{resume} is complete with {steps} steps: to train on, give --steps above that"
        console.print(Text(message), soft_wrap=True)
        return
    kind: type[WayToStart] = SwarmFounder if config.engine == "swarm" else FixedWorkers
    if config.engine == "bucket":
        from diloco.training.processes.bucket_start import BucketFounder

        kind = BucketFounder
    if torchrun:
        from diloco.training.processes.torchrun import TorchrunRank

        kind = TorchrunRank

    def observe(config: RunConfig) -> RunDisplay:
        if resume is None:
            console.print(Text(recipe_line(config), style="dim"), soft_wrap=True)
        return RunDisplay(console, config)

    ended = start_run(kind(config, resume), observe)
    if ended is not None:
        print_end(console, ended)


def _comments(config: RunConfig) -> dict[str, str]:
    """Collect the text under each field of the configuration's dataclasses, by dotted key."""
    comments = {}
    for table, section in sections(config).items():
        for text in docstring_parser.parse_from_object(type(section)).params:
            comments[dotted(table, text.arg_name)] = " ".join((text.description or "").split())
    return comments
