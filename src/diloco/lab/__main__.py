"""`python -m diloco.lab`: the laboratory where the command line's packages are not installed (a GPU machine, say)."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco.errors import ConfigError, DiLoCoError
from diloco.lab import commands
from diloco.lab.runs import STDLIB, print_line


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        return _call(given)
    except ConfigError as error:
        print_line(f"error: {error}")
        return 2
    except DiLoCoError as error:
        print_line(f"error: {error}")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m diloco.lab", description="The papers' experiments on one device.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list").add_argument("--scale", default="cpu")
    for verb in ("run", "tune"):
        one = verbs.add_parser(verb)
        one.add_argument("experiments", nargs="*")
        one.add_argument("--all", action="store_true")
        one.add_argument("--scale", default="smoke")
        one.add_argument("--seeds", type=int, default=3 if verb == "run" else 1)
        one.add_argument("--out", type=Path, required=True)
        one.add_argument("--device", default="auto")
        one.add_argument("--text", default=STDLIB)
        one.add_argument("--domains", default=STDLIB)
        one.add_argument("--seconds", type=float, default=math.inf)
        one.add_argument("--processes", type=int, default=1)
        one.add_argument("--how", default="auto")
    verbs.add_parser("new").add_argument("name")
    report = verbs.add_parser("report")
    report.add_argument("folder", type=Path)
    report.add_argument("experiments", nargs="*")
    report.add_argument("--to", type=Path)
    return parser


def _call(given: argparse.Namespace) -> int:
    if given.verb == "list":
        commands.list_experiments(given.scale, print_line)
    elif given.verb == "new":
        commands.new(given.name, print_line)
    elif given.verb == "report":
        commands.report(given.folder, given.experiments, given.to, print_line)
    else:
        names = ("device", "text", "domains", "seconds", "processes", "how")
        options = {name: getattr(given, name) for name in names}
        found = commands.chosen(given.experiments, given.all)
        if given.verb == "run":
            commands.run(found, given.scale, given.seeds, given.out, print_line, **options)
        for experiment in found if given.verb == "tune" else ():
            if experiment.tuning is not None or not given.all:
                commands.tune(experiment, given.scale, given.seeds, given.out, print_line, **options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
