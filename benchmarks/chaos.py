"""The swarm under violence: a small language model trains while its workers are killed, frozen, cut off and lied to.

    python benchmarks/chaos.py --rounds 100 --seed 0

Workers are real ones, each a trainer, a sidecar and a p2pd, on machines in network namespaces (which need root;
`--loopback`: all at 127.0.0.1, and no cuts). One is three times slower than the others, one sends NaN, one sends 1e30
and claims a small norm, one claims five rounds of work in every round and stays, one changes its lie from round to
round (against the others, next to nothing, too much work, none), one was not invited, one has the
identity of a live one, one that of a frozen one, and keeps its place when that one thaws; the first worker dies for
good; the network splits; others die, freeze, sleep for longer than a worker may be silent, come back, and new ones
join, at moments that the seed decides (chaos_plan.py). What must be true of it is in tests/support/chaos/story.py. The
final loss is held against that of a calm run of as many rounds with the usual number of workers.
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import search_path  # noqa: F401  `support` of the tests
from chaos_plan import FEWEST_ROUNDS, Plan, short
from chaos_run import Chaos
from measuring import write_results
from support.chaos.worker import calm
from support.swarm.networks import internet, missing
from support.swarm.processes import Workers


@dataclass(frozen=True)
class Outcome:
    """What was done in a chaos run, and what came of it."""

    faults: list[str]
    loss: float
    calm_loss: float
    counts: dict[str, int]
    done: list[tuple[float, int, str]]
    joins: dict[str, int]
    seconds: float
    longest_pause: float

    @property
    def ratio(self) -> float:
        return self.loss / self.calm_loss


def outcome(plan: Plan, folder: Path, *, loopback: bool) -> Outcome:
    """Run the whole chaos, and the calm run beside it."""
    times = {"lost_seconds": plan.lost_seconds, "beat_seconds": plan.lost_seconds / 5}
    with ExitStack() as stack:
        net = None if loopback else stack.enter_context(internet())
        workers = stack.enter_context(Workers(folder, net, **times))
        chaos = Chaos(plan, workers)
        chaos.begin()
        chaos.run()
        chaos.read()
        chronicle = chaos.chronicle
        sorts = chaos.sorts
        seconds = time.monotonic() - chaos.started
    calm_loss, _ = calm(plan.workers, plan.rounds)
    losses = chronicle.losses(sorts.finishing)
    loss = max(losses, default=float("nan"))
    faults = [*chronicle.broken_rules(sorts), *chronicle.unfinished(sorts, plan.rounds)]
    if not loss <= plan.most_loss * calm_loss:
        faults.append(f"the loss is {loss:.4f}, the calm run's {calm_loss:.4f}")
    return Outcome(
        faults, loss, calm_loss, chronicle.counts(), chaos.done, chronicle.joins(), seconds, chronicle.longest_pause()
    )


def show(run_outcome: Outcome) -> None:
    console = Console(width=max(100, Console().width))
    table = Table(title="what was done")
    for name in ("second", "after round", "deed"):
        table.add_column(name, justify="left" if name == "deed" else "right")
    for second, sequence, deed in run_outcome.done:
        table.add_row(f"{second:.1f}", str(sequence), deed)
    console.print(table)
    table = Table(title="what came of it")
    table.add_column("")
    table.add_column("", justify="right")
    for name, count in run_outcome.counts.items():
        table.add_row(name, str(count))
    late = ", ".join(f"{life}: {missed}" for life, missed in run_outcome.joins.items())
    table.add_row("rounds that a joiner missed after it had the state", late)
    table.add_row("longest time between two rounds", f"{run_outcome.longest_pause:.1f} s")
    table.add_row(
        "loss, calm run's, ratio", f"{run_outcome.loss:.4f}, {run_outcome.calm_loss:.4f}, {run_outcome.ratio:.4f}"
    )
    table.add_row("seconds", f"{run_outcome.seconds:.0f}")
    console.print(table)
    for fault in run_outcome.faults:
        console.print(f"FAULT: {fault}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--short", action="store_true", help="16 rounds, and workers are lost sooner")
    parser.add_argument("--loopback", action="store_true", help="all workers at 127.0.0.1: no root, and no cuts")
    parser.add_argument("--keep", type=Path, help="a folder to leave the workers' logs and stories in")
    options = parser.parse_args()
    if options.rounds < FEWEST_ROUNDS:
        parser.error(f"--rounds {options.rounds} must be at least {FEWEST_ROUNDS}: there is a lot to do")
    if not options.loopback and (reason := missing()):
        parser.error(f"no cut of a network can be made: {reason}; or --loopback, without cuts")
    plan = short(options.seed) if options.short else Plan(options.rounds, options.seed, 5.0, 0.05)
    print(f"rounds {plan.rounds}, seed {plan.seed}")
    with tempfile.TemporaryDirectory() as folder:
        run_outcome = outcome(plan, options.keep or Path(folder), loopback=options.loopback)
    show(run_outcome)
    if not options.short:
        results = {
            "rounds": plan.rounds,
            "seed": plan.seed,
            "loss": run_outcome.loss,
            "calm_loss": run_outcome.calm_loss,
            "counts": run_outcome.counts,
            "joins": run_outcome.joins,
            "seconds": run_outcome.seconds,
            "faults": run_outcome.faults,
            "longest_pause": run_outcome.longest_pause,
        }
        print(f"written: {write_results('chaos', results).name}")
    return 1 if run_outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
