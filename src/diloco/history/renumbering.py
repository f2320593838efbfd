"""A worker that gets another number keeps its history: readers show all of its events under its last number.

In a swarm the event `renumbered` has the number `before`, and is written under the new one, as are all later events of
that worker. What the log says of `before` from there on is about another worker. Torch-free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
_LISTS = ("contributors", "roster", "disagreeing", "measured_by", "told_by", "withheld")
_BY_WORKER = ("refused", "clipped", "replaced", "agreement", "doubtful")
_LONGEST_NUMBER = 9
"""Digits of a worker's number at most."""
_REPORTS = {"members": "worker", "confirmed": "worker", "present": "member"}


@dataclass(frozen=True)
class LastNumber:
    number: int
    peer: str


Numbers = dict[int, LastNumber]
"""The last number of a worker, by the number that it had at some moment of this log."""


def follow_numbers(log: Sequence[Event], later: Sequence[Event] = ()) -> list[Event]:
    """The events of a log, each under the last number of its worker. `later`: `renumbered` events after these."""
    followed = list(log)
    numbers = Numbers()
    for event in reversed(later):
        _go_back(numbers, event)
    for index in range(len(followed) - 1, -1, -1):
        event = followed[index]
        if numbers and isinstance(event, dict):  # a log may hold other JSON
            followed[index] = _with_numbers(event, numbers)
        if is_renumbering(event):
            _go_back(numbers, event)
    return followed


def is_renumbering(event: object) -> bool:
    if not isinstance(event, dict) or event.get("type") != "renumbered":
        return False
    return isinstance(event.get("before"), int) and isinstance(event.get("worker"), int)


def _go_back(numbers: Numbers, renumbered: Event) -> None:
    """Turn the last numbers as seen after this event into those as seen before it."""
    after = numbers.pop(renumbered["worker"], LastNumber(renumbered["worker"], ""))
    numbers[renumbered["before"]] = LastNumber(after.number, str(renumbered.get("peer") or ""))


def _with_numbers(event: Event, numbers: Numbers) -> Event:
    """The event with the last numbers, wherever it names a worker of this log."""

    def last(number: Any) -> Any:
        return numbers[number].number if isinstance(number, int) and number in numbers else number

    changed: Event = {"worker": last(event.get("worker"))}
    for name in _LISTS:
        if isinstance(event.get(name), list):
            changed[name] = [last(number) for number in event[name]]
    for name in _BY_WORKER:
        if isinstance(event.get(name), dict):
            changed[name] = {
                str(last(int(key)) if key.isdecimal() and len(key) <= _LONGEST_NUMBER else key): value
                for key, value in event[name].items()
            }
    for name, key in _REPORTS.items():
        if isinstance(event.get(name), list):
            changed[name] = [
                report | {key: last(report.get(key))} if isinstance(report, dict) else report for report in event[name]
            ]
    if event.get("type") != "renumbered" and isinstance(event.get("member"), int):
        mine = numbers.get(event["member"])  # two workers had this number: the peer tells which one is meant
        if mine is not None and mine.peer and mine.peer == event.get("peer"):
            changed["member"] = mine.number
    return event | changed
