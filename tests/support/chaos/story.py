"""What the workers of a chaos run have written down, and what must be true of it.

At every moment (`broken_rules`), whatever was done to them and however slow the machine is:

digests     all that have the state after a round have the same one, from their merge or taken over from others
mean        all that ended a round name the same contributors and weights
work        the weights of a worker that are in means add up to the inner steps behind them: none twice, and none lost
            but what was refused
lies        no liar is in a mean; no honest worker is banned
strangers   no worker without a valid invitation is let in

At the end of a run of so many rounds (`unfinished`):

progress    every round has ended, with a contribution in it, and every honest worker that was left alive with it
answers     each liar is banned, each stranger was told that it is not invited, each worker whose place a copy has
            taken that it was replaced
"""

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.core.merging import MAX_WEIGHT_ROUNDS
from support.chaos.worker import H

Line = dict[str, Any]


@dataclass(frozen=True)
class Lives:
    """Which of the processes are what; by the names of lives."""

    liars: frozenset[str]
    strangers: frozenset[str]
    finishing: frozenset[str] = frozenset()
    """Honest ones that were not killed: they must come to the end."""
    replaced: frozenset[str] = frozenset()
    """Those whose place a copy has taken while they were frozen: they must end, and say why."""
    greedy: frozenset[str] = frozenset()
    """Those that claim more work than they did. No rule forbids it; they count as others do."""


class Chronicle:
    """All lines of all workers, in the order of their time; they share one clock."""

    def __init__(self, paths: list[Path]) -> None:
        self.lines: list[Line] = []
        self._bytes_read: dict[Path, int] = defaultdict(int)
        self.read(paths)

    def read(self, paths: list[Path]) -> None:
        """What they have written since the last time."""
        for path in paths:
            if path.exists():
                lines = _whole_lines(path, self._bytes_read[path])
                self.lines += [json.loads(line) for line in lines.splitlines()]
                self._bytes_read[path] += len(lines)
        self.lines.sort(key=lambda line: float(line["time"]))

    def of(self, kind: str, lives: frozenset[str] | None = None) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind and (lives is None or line["life"] in lives)]

    def ended(self) -> int:
        """The latest round that ended well for a worker; −1 before the first."""
        return max((line["round"] for line in self.of("round") if line["failure"] is None), default=-1)

    def losses(self, lives: frozenset[str]) -> list[float]:
        return [line["loss"] for line in self.of("end", lives)]

    # What must be true

    def broken_rules(self, lives: Lives) -> list[str]:
        return [
            *self._different_digests(),
            *self._different_means(),
            *self._work_that_does_not_add_up(lives),
            *self._lies_and_wrong_bans(lives),
            *(f"{line['life']} was let in" for line in self.of("start", lives.strangers)),
        ]

    def unfinished(self, lives: Lives, rounds: int) -> list[str]:
        ended = {line["round"] for line in self.of("round") if line["failure"] is None and line["total"] > 0}
        missing = sorted(set(range(rounds)) - ended)
        errors = {line["life"]: line["text"] for line in self.of("error")}
        left = sorted(lives.finishing - {line["life"] for line in self.of("end")})
        numbers, banned = self._numbers(lives.liars), self._banned()
        return [
            *([f"rounds {missing} have no mean"] if missing else []),
            *(f"{life} did not come to the end: {errors.get(life, 'it left no reason')}" for life in left),
            *(f"{life} was never banned" for number, life in numbers.items() if number not in banned),
            *(f"{life} was not told that it is not invited" for life in sorted(lives.strangers - errors.keys())),
            *(f"{life} was not told that it was replaced" for life in sorted(lives.replaced - errors.keys())),
        ]

    def _different_digests(self) -> list[str]:
        digests: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for line in self.lines:
            if line["kind"] in ("start", "resync", "end") or (line["kind"] == "round" and line["failure"] is None):
                after = line["round"] if line["kind"] == "round" else line["sequence"] - 1
                if line["kind"] != "end":  # the confirmation is a round without a mean
                    digests[after][line["digest"]].append(line["life"])
        final = {line["digest"] for line in self.of("end")}
        faults = [f"after round {after} there are several states: {dict(told)}" for after, told in digests.items()
                  if len(told) > 1]  # fmt: skip
        return faults + ([f"the workers end with different states: {final}"] if len(final) > 1 else [])

    def _different_means(self) -> list[str]:
        means: dict[int, set[str]] = defaultdict(set)
        faults = []
        for line in self.of("round"):
            if line["failure"] is None:
                means[line["round"]].add(json.dumps([line["weights"], line["refused"]], sort_keys=True))
                least, most = (sum(min(w, n * H) for w in line["weights"].values()) for n in (1, MAX_WEIGHT_ROUNDS))
                if not least - 1e-9 <= line["total"] <= most + 1e-9:
                    faults.append(f"round {line['round']}: the weights {line['weights']} are not {line['total']}")
        return faults + [f"round {number} has several means: {told}" for number, told in means.items() if len(told) > 1]

    def _work_that_does_not_add_up(self, lives: Lives) -> list[str]:
        """`work` is counted by the worker itself, the weights are what all others were told and averaged with.

        Work that was refused (a norm too far above the others') may be missing; no work is there twice.
        """
        faults = []
        for life in {line["life"] for line in self.of("start")} - lives.liars - lives.greedy:
            told, refused = 0.0, False
            for line in self.of("round", frozenset([life])):
                number, work = str(line["number"]), float(line["work"])
                refused |= number in (line.get("refused") or {})
                if number in (line.get("weights") or {}):
                    told += line["weights"][number]
                    whole = line["weights"][number] < MAX_WEIGHT_ROUNDS * H  # more work is told as so much
                    if told > work or (told < work and not refused and whole):
                        faults.append(f"{life}, round {line['round']}: {told:g} steps are in means, it took {work:g}")
                        break
                    told, refused = work, False
        return faults

    def _lies_and_wrong_bans(self, lives: Lives) -> list[str]:
        lies, holders = [], dict[str, str]()  # a number may pass from a banned worker to a new one
        for line in self.lines:
            if line["kind"] == "start":
                holders[str(line["number"])] = line["life"]
            found = [holders[number] for number in line.get("weights") or {} if holders.get(number) in lives.liars]
            lies += [f"round {line['round']}: the lie of {life} is in the mean" for life in found]
        wrong = sorted(self._banned() - self._numbers(lives.liars).keys())
        return lies + [f"the honest worker {number} was banned" for number in wrong]

    def _numbers(self, lives: frozenset[str]) -> dict[str, str]:
        return {str(line["number"]): line["life"] for line in self.of("start", lives)}

    def _banned(self) -> set[str]:
        return {str(line["fields"]["number"]) for line in self.of("event") if line["type"] == "member_banned"}

    # What is told of it

    def counts(self) -> dict[str, int]:
        events = self.of("event")
        return {
            "members joined": len({(line["fields"]["peer"]) for line in events if line["type"] == "member_joined"}),
            "members lost": sum(line["type"] == "member_lost" for line in events),
            "members banned": len({line["fields"]["peer"] for line in events if line["type"] == "member_banned"}),
            "rounds failed for a worker": sum(line["failure"] is not None for line in self.of("round")),
            "resyncs": len(self.of("resync")),
            "contributions": sum(self.contributions().values()),
        }

    def contributions(self) -> dict[int, int]:
        """How many were in each round's mean."""
        return {line["round"]: len(line["weights"]) for line in self.of("round") if line["failure"] is None}

    def ends(self) -> dict[int, Line]:
        """Of each round that ended: the first line that tells it."""
        found: dict[int, Line] = {}
        for line in self.of("round"):
            if line["failure"] is None:
                found.setdefault(line["round"], line)
        return dict(sorted(found.items()))

    def longest_pause(self) -> float:
        """Seconds between the ends of two rounds, the longest."""
        times = [line["time"] for line in self.ends().values()]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    def joins(self) -> dict[str, int]:
        """Of those that joined later: how many rounds ended, after they had the state, before one had their work."""
        ended, found = {number: line["time"] for number, line in self.ends().items()}, {}
        for start in self.of("start"):
            rounds = self.of("round", frozenset([start["life"]]))
            first = [line["round"] for line in rounds if str(line["number"]) in (line.get("weights") or {})]
            if start["sequence"] > 0 and first:
                after = [number for number, at in ended.items() if at > start["time"]]
                found[str(start["life"])] = sum(number < first[0] for number in after)
        return found


def _whole_lines(path: Path, first: int) -> bytes:
    """From byte `first` on. A worker that was killed may have left half a line."""
    with path.open("rb") as file:
        file.seek(first)
        lines, newline, _ = file.read().rpartition(b"\n")
        return lines + newline
