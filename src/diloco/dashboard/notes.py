"""What happened in a run besides steps and rounds: one plain line for an event, and how much it matters."""

from collections.abc import Callable
from typing import Any

from diloco.training.records.events import Event

Kind = str  # "good", "info", "warning" or "bad"
_Note = Callable[[Event], str]
_LONGEST = 500


def _name(event: Event) -> str:
    where = f" ({event['label']})" if event.get("label") else ""
    return f"worker {event['member']}{where}"


def _lost(event: Event) -> str:
    return f"; {event['rounds']} rounds and {event['tokens']:,} tokens are lost" if "rounds" in event else ""


_NOTES: dict[str, tuple[Kind, _Note]] = {
    "resumed": ("info", lambda e: f"continued from step {e['step']}"),
    "checkpoint": ("info", lambda e: f"checkpoint of step {e['step']}"),
    "checkpoint_failed": (
        "bad",
        lambda e: f"worker {e['worker']} could not write the checkpoint of step {e['step']}: {e['reason']}",
    ),
    "checkpoint_skipped": ("warning", lambda e: f"the checkpoint of step {e['step']} was left out: {e['reason']}"),
    "sample_skipped": ("warning", lambda e: f"no sample: {e['reason']}"),
    "worker_finished": ("good", lambda e: f"worker {e['worker']} has ended after step {e['inner_steps']}"),
    "worker_failed": ("bad", lambda e: f"worker {e['worker']} failed: {e.get('error')}"),
    "swarm": ("info", lambda e: f"worker {e['worker']} {'founded' if e.get('founded') else 'is in'} the swarm"),
    "waiting": ("info", lambda e: f"waiting: {e['present']} of {e['wanted']} workers are present"),
    "joined": ("good", lambda e: f"worker {e['worker']} starts at step {e['step']}, the position of the swarm"),
    "member_left": ("info", lambda e: f"{_name(e)} has left"),
    "member_lost": ("bad", lambda e: f"{_name(e)} is lost: {e['reason']}"),
    "member_banned": ("bad", lambda e: f"{_name(e)} is banned: {e['reason']}"),
    "member_expelled": ("bad", lambda e: f"{_name(e)} is excluded: {e['reason']}"),
    "excluded": ("bad", lambda e: f"worker {e['worker']} is excluded from the swarm: {e['reason']}"),
    "alone": ("warning", lambda _: "training alone at the moment: no other member answers"),
    "called": ("warning", lambda e: f"worker {e['worker']} was slow in round {e['sequence']} and posted what it had"),
    "minority": ("warning", lambda e: f"{e['here']} of {e['members']} members are here: no round ends until most are"),
    "warm_start": (
        "info",
        lambda e: f"worker {e['worker']} waits for the warm start: step {e['step']} of {e['steps']}",
    ),
    "diverged": ("warning", lambda e: f"worker {e['worker']} has diverged and fetches the others' state{_lost(e)}"),
    "resync": ("warning", lambda e: f"worker {e['worker']} has fetched the others' state: {e['reason']}"),
    "sidecar_lost": ("bad", lambda e: f"the network process of worker {e['worker']} died: {e['reason']}"),
    "sidecar_restarted": ("warning", lambda e: f"the network process of worker {e['worker']} was restarted"),
    "shards_not_fetched": ("warning", lambda e: f"shards could not be fetched: {e['reason']}"),
}


def note_of(event: Event) -> tuple[Kind, str] | None:
    """Kind and text; None for an event that needs no line."""
    if event["type"] == "member_joined":
        return None if event.get("already") else ("good", f"{_name(event)} has joined")
    if event["type"] == "round":
        return _round_note(event)
    found = _NOTES.get(event["type"])
    return None if found is None else (found[0], found[1](event)[:_LONGEST])


def _round_note(event: dict[str, Any]) -> tuple[Kind, str] | None:
    if event.get("failure") is not None:
        return "bad", f"round {event['sequence']} failed: {event['failure']}"[:_LONGEST]
    refused = event.get("refused") or {}
    if refused:
        reasons = "; ".join(f"worker {worker}: {reason}" for worker, reason in refused.items())
        return "warning", f"round {event['sequence']} refused {reasons}"[:_LONGEST]
    return None
