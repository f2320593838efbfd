"""The tokens of a swarm's run, worker by worker: one count, the same on every machine.

A worker's count is that of its contributions which are in the run's means. It tells it in the note of every post, and
all that get the round take it from there. The counts of all come to a joiner with the state, also its own from before:
a worker that was killed goes on from what is in the run, and not from what it had trained on since its last round.

A worker can have taken no more steps than the schedule has had: a count above that is taken for that, and its worker is
named. So a false one makes the total larger by less than what the worker would have trained on, had it been there from
the first step on. (A worker that was cut off, and trained on faster than the others, may be above it too.)

At the end all members tell all counts with the confirmation, and agree on the median of each: one that missed a round
has the others' numbers then, and one that lies changes none (among three and more).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from diloco.engines.note import Note


class TokenCounts:
    """The tokens of all workers, as one worker knows them."""

    def __init__(self) -> None:
        self.by_worker: dict[int, int] = {}
        self.earlier = 0
        """Tokens of this worker's earlier starts, as far as they are in the run."""
        self._doubted: set[int] = set()
        """Workers whose latest count was more than the schedule has had."""

    @property
    def total(self) -> int:
        return sum(self.by_worker.values())

    def begin(self, worker: int) -> None:
        """Count this worker's own steps from 0 again: it has joined."""
        self.earlier = self.by_worker.get(worker, 0)

    def in_note(self, note: Note, tokens: int) -> Note:
        """Return the note, with the counts; `tokens`: that this worker has trained on in this start."""
        return replace(note, own_tokens=self.earlier + tokens, tokens=dict(sorted(self.by_worker.items())))

    def after_round(self, notes: Mapping[int, Note], most: int) -> dict[int, int]:
        """Take in the notes of the workers whose contributions are in a mean: the count of each, up to `most`, the
        tokens of all steps of the schedule so far.

        Returns the counts of the workers that claim more, and did not the time before.
        """
        newly_doubted = {}
        for worker, note in notes.items():
            self._learn(worker, min(note.own_tokens, most))
            if note.own_tokens <= most:
                self._doubted.discard(worker)
            elif worker not in self._doubted:
                self._doubted.add(worker)
                newly_doubted[worker] = note.own_tokens
        return newly_doubted

    def read_state_note(self, note: Note, most: int) -> None:
        """Take in the counts of the member that sent this worker its state."""
        for worker, tokens in note.tokens.items():
            self._learn(worker, min(tokens, most))

    def _learn(self, worker: int, tokens: int) -> None:
        self.by_worker[worker] = max(tokens, self.by_worker.get(worker, 0))

    def agree(self, notes: Iterable[Note], most: int) -> None:
        """Take the (upper) median of each count in these notes, which all that have confirmed the end have of each
        other."""
        tables = [note.tokens for note in notes]
        for worker in {worker for table in tables for worker in table}:
            counts = sorted(table[worker] for table in tables if worker in table)
            if 2 * len(counts) >= len(tables):
                self.by_worker[worker] = min(counts[len(counts) // 2], most)

    # Saved

    def state_dict(self) -> dict[str, Any]:
        return {"by_worker": {str(worker): count for worker, count in self.by_worker.items()}, "earlier": self.earlier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the saved counts; an earlier version saved none."""
        self.by_worker = {int(worker): count for worker, count in state.get("by_worker", {}).items()}
        self.earlier = state.get("earlier", 0)
