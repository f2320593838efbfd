"""`python -m diloco.lab`: the laboratory where the command line's packages are not installed (a GPU machine, say)."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from diloco.errors import ConfigError, DiLoCoError
from diloco.lab import commands
from diloco.lab.commands import print_line
from diloco.lab.run_options import RunOptions

_TYPES: dict[str, Callable[[str], object]] = {
    "seeds": int, "out": Path, "seconds": float, "processes": int, "save_seconds": float,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        return _run_verb(parsed)
    except ConfigError as error:
        print_line(f"error: {error}")
        return 2
    except DiLoCoError as error:
        print_line(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        print_line("error: interrupted")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m diloco.lab", description="The papers' experiments on one device.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list").add_argument("--scale", default="cpu")
    for verb in ("run", "tune"):
        verb_parser = verbs.add_parser(verb)
        verb_parser.add_argument("experiments", nargs="*")
        verb_parser.add_argument("--all", action="store_true")
        for option in fields(RunOptions):
            flag = f"--{option.name.replace('_', '-')}"
            if isinstance(option.default, bool):
                verb_parser.add_argument(flag, action="store_true")
            else:
                verb_parser.add_argument(flag, type=_TYPES.get(option.name, str), default=option.default)
    verbs.add_parser("new").add_argument("name")
    report = verbs.add_parser("report")
    report.add_argument("folder", type=Path)
    report.add_argument("experiments", nargs="*")
    report.add_argument("--to", type=Path)
    return parser


def _run_verb(parsed: argparse.Namespace) -> int:
    if parsed.verb == "list":
        commands.list_experiments(parsed.scale, print_line)
    elif parsed.verb == "new":
        commands.write_new_experiment(parsed.name, print_line)
    elif parsed.verb == "report":
        commands.report(parsed.folder, parsed.experiments, parsed.to, print_line)
    else:
        options = RunOptions(**{option.name: getattr(parsed, option.name) for option in fields(RunOptions)})
        experiments = commands.find_experiments(parsed.experiments, parsed.all)
        if parsed.verb == "run":
            commands.run(experiments, options, print_line)
        else:
            commands.tune(
                [experiment for experiment in experiments if experiment.tuning is not None or not parsed.all],
                options,
                print_line,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
