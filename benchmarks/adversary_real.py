"""Honest members and a bad one, all by the real commands: what becomes of the rounds, the model and the bad one.

    python benchmarks/adversary_real.py                 every row, after a calm run
    python benchmarks/adversary_real.py --rows          their names
    python benchmarks/adversary_real.py --only floods   the calm run and one row (several with commas)
    python benchmarks/adversary_real.py --markdown      the tables of docs/swarm.md, from the result files

`diloco train --engine swarm` founds a run of a small language model, `diloco join` brings four more, each a trainer, a
sidecar and a p2pd on this machine. The fifth is the bad one: the same command, with one behaviour of its sidecar
changed from the fourth round on (benchmarks/attacks); or an honest one, to which a fault happens. Rows in which members
wait, or one more is started, have rounds of five times `lost_seconds`. Each row is added to the result file of earlier
ones when it has ended, and is held against the calm run of its own session and length.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import search_path  # noqa: F401  `support` of the tests
from adversary_faults import NotAsItMustBe, bad_pair, cut, founder_gone, sleep, slow_line, twice
from adversary_run import Figures, Member, Size, Swarm, figures
from measuring import RESULTS, results_path, write_results
from support.swarm.networks import internet, missing

MOST_TIMES = 2.0
"""A round may take this many times a calm one."""
MOST_LOSS = 0.02
"""The final loss may be this much off that of the calm run."""
MOST_ROUNDS = 5
"""Rounds after which a proved liar must be named and out."""
MOST_CALLS = 1000
"""To the third party that 10,000 invented members are said to be; one call of each honest member to each is 40,000."""


@dataclass(frozen=True)
class Row:
    """An attack or a fault, with the run in which it happens."""

    name: str
    attack: str = ""
    """A function of benchmarks/attacks."""
    proved: bool = False
    """The bad member must be named, and out within MOST_ROUNDS rounds."""
    options: tuple[str, ...] = ()
    late: bool = False
    """The last honest member joins when the attack has begun."""
    early: bool = False
    """The bad member attacks from its first message on: the others do not wait for it at the start."""
    leads: bool = False
    """The bad one has founded the run, and leads it."""
    fault: Callable[[Swarm], list[Member]] | None = None
    """What happens to an honest run (adversary_faults.py)."""
    lines: bool = False
    """Each member has a machine of its own, a network namespace of this one; needs root."""
    waits: bool = False
    """Members wait for the bad one, for multiples of `lost_seconds`."""
    members: int = 5
    bad: int = 1
    """How many of them attack, in the same way; the figures are about the first of them."""

    @property
    def long(self) -> bool:
        """Rounds must be long beside `lost_seconds`, or beside the start of one more process."""
        return self.waits or self.late or self.fault is not None


ROWS = (
    Row("calm"),
    Row("calm, long rounds", waits=True),
    Row("contribution × −900", "times_minus_900", proved=True),
    Row("weight 10¹⁸, turned around", "heavy_and_turned", proved=True),
    Row("NaN", "not_a_number", proved=True),
    Row("more than its header claims", "more_than_claimed", proved=True),
    Row("a note with a number of 5,000 digits", "note_of_5000_digits", proved=True),
    Row("a validation loss of 400 digits", "validation_loss_of_400_digits", proved=True),
    Row("a false validation loss", "false_validation_loss", options=("--training.eval_interval=60",)),
    Row("“this round has ended”, a forged mean", "forged_end", proved=True),
    Row("a wrong mean as reducer", "wrong_mean", proved=True),
    Row("different means as reducer", "different_means", proved=True),
    Row("false accusation", "false_accusation", waits=True),
    Row("“number 1 is mine”", "number_1_is_mine", early=True),
    Row("posts first, with another layout", "first_ready_with_another_layout"),
    Row("never posts", "never_posts", waits=True),
    Row("never completes", "never_completes", waits=True),
    Row("keep-alive frames", "keep_alive_frames", waits=True),
    Row("highest term", "highest_term"),
    Row("leads, and makes no plan", "never_plans", leads=True, waits=True),
    Row("10,000 invented members", "invented_members", waits=True),
    Row("invented members with a live one's number", "invented_with_a_live_number", leads=True, waits=True),
    Row("withholds parts, goodbye and hello each round", "withholds_and_returns", waits=True),
    Row("goodbye and hello without end", "goodbye_flood", waits=True),
    Row("a state of 1 TiB, byte by byte", "huge_slow_state", late=True),
    Row("a slow state of the right size", "slow_state", late=True),
    Row("floods", "flood", waits=True),
    Row("a wrong state to a joiner", "wrong_state", late=True),
    Row("small contribution", "small"),
    Row("small contribution, clipped", "small", options=("--sync.merge=clipped",)),
    Row("wrong direction", "wrong_direction"),
    Row("wrong direction, clipped", "wrong_direction", options=("--sync.merge=clipped",)),
    Row("calm, three members", members=3),
    Row("× −2.9", "against"),
    Row("× −2.9, clipped", "against", options=("--sync.merge=clipped",)),
    Row("× −2.9 in every second round", "against_sometimes"),
    Row("two of five × −2.9", "against", bad=2),
    Row("one of three × −2.9", "against", members=3),
    Row("a wrong clipped mean as reducer", "wrong_mean", proved=True, options=("--sync.merge=clipped",)),
    Row("a member sleeps", fault=sleep),
    Row("one identity twice", fault=twice),
    Row("the founder is gone", fault=founder_gone),
    Row("two members cannot reach each other", fault=bad_pair, lines=True),
    Row("a line of 1 Mbit/s", fault=slow_line, lines=True),
    Row("a cut, a joiner on each side", fault=cut, lines=True),
    Row("plans, votes and commits are lost", "loses_messages", waits=True),
)


@contextmanager
def third_party() -> Iterator[tuple[int, list[float]]]:
    """Yield a port of a machine that has nothing to do with the run, and the times of connections to it."""
    calls: list[float] = []
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:

        def listen() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return
                calls.append(time.monotonic())

        threading.Thread(target=listen, daemon=True).start()
        yield server.getsockname()[1], calls
        server.shutdown(socket.SHUT_RDWR)


def run(row: Row, size: Size, folder: Path, cache: Path) -> tuple[Figures, dict[str, Any]]:
    """Run a row. Returns the figures of the honest members, and other facts about the run."""
    started = time.monotonic()
    with ExitStack() as stack:
        port, calls = stack.enter_context(third_party())
        net = stack.enter_context(internet()) if row.lines else None
        swarm = stack.enter_context(Swarm(folder, size, cache, environment={"ATTACK_PORT": str(port)}, net=net))
        expected = row.members - 1 if row.late or row.early else row.members
        swarm.found(*row.options, attack=row.attack if row.leads else "", min_workers=expected)
        for number in range(1, row.members - row.bad - (1 if row.late else 0)):
            swarm.join(f"honest-{number}")
        for number in range(row.bad):
            swarm.join(f"bad-{number}" if number else "fifth", attack="" if row.leads else row.attack)
        if row.late:
            swarm.wait_for_round(size.attack_from, swarm.members[0])
            swarm.join("late")
        problem = ""
        expected_to_finish = [member for member in swarm.members if not member.bad]
        try:
            expected_to_finish = expected_to_finish if row.fault is None else row.fault(swarm)
            swarm.wait(lambda: all(member.code is not None for member in expected_to_finish))
        except (TimeoutError, NotAsItMustBe) as reason:
            problem = str(reason)
        bad = next((member for member in swarm.members if member.bad), None)
        measured = figures(expected_to_finish, bad, size)
        ends = [member.output[-800:] for member in expected_to_finish if member.code != 0]
    run_facts = {"problem": problem, "ends": ends, "seconds": time.monotonic() - started, "third_party": len(calls)}
    run_facts["load"] = os.getloadavg()[0]  # of the machine; five members alone make about 5
    return measured, run_facts


def faults(row: Row, measured: Figures, calm: Figures, size: Size, run_facts: dict[str, Any]) -> list[str]:
    """List what is not as it must be."""
    faults_found = [run_facts["problem"]] if run_facts["problem"] else []
    if any(code != 0 for code in measured.codes):
        faults_found.append(f"an honest member ended with {measured.codes}")
    if measured.rounds < (size.rounds if not (row.late or row.fault) else 1):
        faults_found.append(f"{measured.rounds} rounds of {size.rounds}")
    if not measured.digests_equal:
        faults_found.append("honest members differ")
    if measured.honest_banned:
        faults_found.append(f"an honest member is banned: {measured.honest_banned[0]}")
    if not abs(measured.loss / calm.loss - 1) <= MOST_LOSS:
        faults_found.append(f"the loss is off by {measured.loss / calm.loss - 1:+.1%}")
    if measured.longest_seconds > MOST_TIMES * calm.round_seconds:
        faults_found.append(f"a round took {measured.longest_seconds / calm.round_seconds:.1f} times the usual")
    for event, rounds_after in (("named", measured.named_after), ("out", measured.out_after)):
        if row.proved and (rounds_after is None or rounds_after > MOST_ROUNDS):
            faults_found.append(f"the bad one is not {event} in time")
    if run_facts["third_party"] > MOST_CALLS:
        faults_found.append(f"{run_facts['third_party']} connections to a third party")
    return faults_found


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "row", "rounds", "usual, s", "longest, ×", "digests", "loss", "named", "out", "banned", "not as it must be"
    )
    for row in rows:
        out = "" if row["out_after"] is None else str(row["out_after"])
        named = "" if row["named_after"] is None else f"{row['named_after']}: {row['named_as'][:30]}"
        table.add_row(
            row["row"], str(row["rounds"]), f"{row['round_seconds']:.2f}", f"{row['longest_times']:.2f}",
            "equal" if row["digests_equal"] else "DIFFER", f"{row['loss_change']:+.1%}", named, out,
            "" if row["banned_after"] is None else str(row["banned_after"]), "; ".join(row["faults"]),
        )  # fmt: skip
    Console(width=220).print(table)


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| row | rounds, × calm (longest) | honest digests | loss | named after | out after |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        named, out = ("" if row[key] is None else f"{row[key]} rounds" for key in ("named_after", "out_after"))
        digests = "equal" if row["digests_equal"] else "**differ**"
        usual_times = "" if row["usual_times"] is None else f"{row['usual_times']:.2f} "
        loss = "" if row["loss_change"] is None else f"{row['loss_change']:+.1%}"
        cells = [row["row"], f"{usual_times}({row['longest_times']:.2f})", digests, loss, named, out]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print the names of the rows, and end")
    parser.add_argument("--markdown", action="store_true", help="print each result file as a table, and end")
    parser.add_argument("--only", default="", help="rows by their names or parts of them, with commas")
    parser.add_argument("--keep", type=Path, help="a folder to leave the run folders and logs in")
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no member is left behind
    size = Size(**{name: getattr(options, name) for name in asdict(Size())})
    words = [word for word in options.only.split(",") if word]
    wanted_rows = [row for row in ROWS[1:] if not words or any(word in row.name for word in words)]
    calm = [row for row in ROWS if not row.attack and row.fault is None]  # of each length and number of members
    calm_rows = [
        row
        for row in calm[1:]
        if any((wanted_row.long, wanted_row.members) == (row.long, row.members) for wanted_row in wanted_rows)
    ]
    rows_to_run = [ROWS[0], *calm_rows, *(row for row in wanted_rows if row not in calm)]
    if options.rows:
        print("\n".join(row.name for row in ROWS))
        return 0
    if options.markdown:
        for path in sorted(RESULTS.glob("adversary-real-*.json")):
            content = json.loads(path.read_text())
            machine = content["machine"]
            print(f"{machine['processor']}, {machine['cores']} cores:\n\n{markdown(content['results'])}\n")
        return 0
    if words and not wanted_rows and not any(word in "calm" for word in words):
        parser.error(f"--only {options.only}: no such row; --rows names them")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        rows = measure(rows_to_run, size, folder)
    show(rows)
    print(f"written: {results_path('adversary-real').name}")
    return 1 if any(row["faults"] for row in rows) else 0


def measure(rows_to_run: list[Row], short: Size, folder: Path) -> list[dict[str, Any]]:
    """Run the rows, and hold each against the calm run of its length and number of members, which comes first."""
    rows: list[dict[str, Any]] = []
    calm_runs = dict[tuple[bool, int], Figures]()
    for index, row in enumerate(rows_to_run):
        if row.lines and (reason := missing()):
            print(f"{row.name}: not run, {reason}")
            continue
        run_folder = folder / f"{index}-{row.attack or 'run'}"
        run_folder.mkdir(parents=True)
        size = short.longer(calm_runs[False, 5]) if row.long else short
        measured, run_facts = run(row, size, run_folder, folder / "cache")
        calm = calm_runs.setdefault((row.long, row.members), measured)
        result = {"row": row.name, **asdict(measured), "loss_change": measured.loss / calm.loss - 1}
        result |= {"usual_times": measured.round_seconds / calm.round_seconds}
        result |= {"longest_times": measured.longest_seconds / calm.round_seconds, **run_facts, "size": asdict(size)}
        rows.append(result | {"faults": faults(row, measured, calm, size, run_facts)})
        save(rows)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def save(rows: list[dict[str, Any]]) -> None:
    """Write these rows, and those of earlier runs that were not run again."""
    path = results_path("adversary-real")
    earlier = json.loads(path.read_text())["results"] if path.exists() else []
    new_names = {row["row"] for row in rows}
    order = [row.name for row in ROWS]
    kept_rows = [row for row in earlier if row["row"] not in new_names and row["row"] in order] + rows
    write_results("adversary-real", sorted(kept_rows, key=lambda row: order.index(row["row"])))


if __name__ == "__main__":
    sys.exit(main())
