"""Rounds of a swarm whose machines have bad lines: real workers in network namespaces of this machine. Needs root.

    python benchmarks/lines.py --case pair     two machines, neither leads, drop each other's packets
    python benchmarks/lines.py --case slow     one machine has a line of 1 Mbit/s, in both directions
    python benchmarks/lines.py --case calm

Each of four workers posts a contribution without a model (int8, --megabytes) as soon as a round has ended. The line is
made bad after the first round. Printed are each round's time, the workers in its mean, and members that were lost.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import search_path  # noqa: F401  `support` of the tests
from diloco.swarm.run_files import invitation_file, write_private
from diloco.swarm.settings import Settings
from diloco.swarm.trust.invitation import invite
from diloco.swarm.trust.run_key import RunKey
from support.swarm.networks import Internet, internet

WORKERS = 4
_ROUND_SECONDS = 300.0


def work(task: dict[str, Any]) -> None:
    """Run one worker, which prints a line of JSON for its start, each round and each member that it loses."""
    import torch
    from msgspec import convert

    from diloco.engines.rounds import GlobalState
    from diloco.errors import RoundFailed
    from diloco.swarm.engine import SwarmEngine
    from support.rounds import average

    def report(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    def on_event(type_: str, fields: Any) -> None:
        if type_ == "member_lost":
            report(lost=fields["number"], reason=fields["reason"])

    torch.set_num_threads(1)
    sequence = 0
    engine = SwarmEngine(convert(task["settings"], Settings), on_event=on_event)
    engine.serve_state(lambda: GlobalState({}, {"sequence": sequence, "inner_steps": 0}, "same"))
    engine.fetch_state()
    own_member = next(member for member in engine.status().members if member.number == engine.worker)
    report(worker=engine.worker, addresses=own_member.addresses)
    while sum(member.live and member.has_state for member in engine.status().members) < WORKERS:
        time.sleep(0.05)
    while sequence < task["rounds"]:
        sys.stdin.readline()
        started = time.monotonic()
        try:
            result = average(engine, sequence, _ROUND_SECONDS, numel=task["numel"], name="int8")
            report(round=sequence, seconds=time.monotonic() - started, contributors=result.contributors)
            sequence += 1
        except RoundFailed as failure:
            report(round=sequence, seconds=time.monotonic() - started, failure=str(failure))
            state = engine.fetch_state() if failure.resync else None
            sequence = sequence + 1 if state is None else state.numbers["sequence"] + len(state.means)
    sys.stdin.readline()
    engine.close()


class Worker:
    def __init__(
        self, net: Internet, machine: str, folder: Path, key: RunKey, addresses: list[str], **task_fields: Any
    ) -> None:
        swarm = folder / machine / "swarm"
        write_private(swarm / invitation_file(), invite(key, addresses, 3600.0, time.time()).text())
        settings = asdict(Settings(str(swarm), "worker-0", founder=not addresses, port=4000))
        command = [sys.executable, __file__, "--worker", json.dumps({"settings": settings, **task_fields})]
        self.process = subprocess.Popen(
            net.inside(machine, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker has ended with {self.process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]

    def go(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    @contextmanager
    def running(self) -> Iterator["Worker"]:
        try:
            yield self
        finally:
            self.process.kill()
            self.process.wait()


def spoil(net: Internet, case: str, addresses: list[str]) -> None:
    if case == "pair":
        net.block("m1", addresses[3])
        net.block("m3", addresses[1])
    if case == "slow":
        net.limit("m3", "1mbit")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=["calm", "pair", "slow"], default="calm")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--megabytes", type=float, default=1.0, help="a contribution's")
    parser.add_argument("--keep", type=Path, help="a folder to leave the workers' logs in")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return 0
    task_fields = {"rounds": options.rounds, "numel": int(1e6 * options.megabytes)}
    key = RunKey.create()
    num_lost = 0
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        net = stack.enter_context(internet())
        public_addresses = [net.public(f"m{index}") for index in range(WORKERS)]
        first = stack.enter_context(Worker(net, "m0", folder, key, [], **task_fields).running())
        addresses = first.hear()["addresses"]
        workers = [first]
        for index in range(1, WORKERS):
            workers.append(
                stack.enter_context(Worker(net, f"m{index}", folder, key, addresses, **task_fields).running())
            )
            assert workers[-1].hear()["worker"] == index
        for number in range(options.rounds):
            for worker in workers:
                worker.go()
            times: list[float] = []
            contributors: set[tuple[int, ...]] = set()
            for index, worker in enumerate(workers):
                while "round" not in (line := worker.hear()):
                    print(f"  worker {index} has lost worker {line['lost']}: {line['reason']}")
                    num_lost += 1
                times.append(line["seconds"])
                contributors.add(tuple(line.get("contributors") or [line["failure"]]))
            print(
                f"round {number}: {', '.join(f'{seconds:.1f}' for seconds in times)} s, in it {contributors}",
                flush=True,
            )
            if number == 0:
                spoil(net, options.case, public_addresses)
    print(f"{options.case}: {options.rounds} rounds, {num_lost} times a member was lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
