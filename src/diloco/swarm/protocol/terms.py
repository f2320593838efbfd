"""What a run says of a round: its fragment, the layout of what is trained, the bound on norms, the kind of mean.

A worker's terms are those of its trainer, which has them from the run's description. A leader makes plans on the terms
of its own worker; only where that one has not posted, on those of most workers in the round. A worker with other terms
is told so and is left out: it decides nothing for the others, whether it comes first or not.
"""

from collections import Counter
from typing import NamedTuple

from diloco.core.config import Merge
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.protocol.plan import Entry, parse_header
from diloco.swarm.trainer import PostedRound


class Terms(NamedTuple):
    fragment: int
    layout: str
    max_norm_ratio: float | None
    merge: Merge


def own_terms(posted: PostedRound) -> Terms:
    layout = parse_header(0, posted.header).layout_digest
    return Terms(posted.key.fragment, layout, posted.max_norm_ratio, posted.merge)


def own_layout(entry: Entry) -> tuple[int, str]:
    """Read the fragment and the layout that a worker's header names."""
    return entry.parsed.key.fragment, entry.parsed.layout_digest


class ReadyWorkers:
    """The workers whose headers have arrived in a round, for its leader."""

    def __init__(self, layout: str | None) -> None:
        """`layout`: of the leader's own earlier rounds, if it has posted any; for rounds that it does not post in."""
        self.entries: dict[str, Entry] = {}
        self._terms: dict[str, Terms] = {}
        self._layout = layout
        self.left_out: list[str] = []
        """Workers that had other terms when these were last settled."""

    def add(self, entry: Entry, terms: Terms, mine: Terms | None) -> None:
        """Raises CallRefused for other terms than the leader's own, once it has posted in this round."""
        if terms != (mine or terms):
            raise CallRefused(
                f"worker {entry.number} trains something else than this run: {_text(terms)} against "
                f"{_text(mine or terms)}. Model, data, codec, schedule and outer "
                "optimizer must be the same everywhere; compare the workers' config.toml and versions",
                "model",
            )
        self.entries[entry.peer] = entry  # a worker that was restarted may post another one
        self._terms[entry.peer] = terms

    def settle(self, mine: Terms | None) -> Terms | None:
        """Return the terms on which the round goes on. Workers with other terms are no longer ready, and are told so
        when they ask again."""
        fitting = [terms for terms in self._terms.values() if terms.layout == (self._layout or terms.layout)]
        terms = mine or (Counter(fitting).most_common(1)[0][0] if fitting else None)
        self.left_out = [peer for peer, other in self._terms.items() if other != terms]
        for peer in self.left_out:
            del self.entries[peer], self._terms[peer]
        return terms


def _text(terms: Terms) -> str:
    return (
        f"fragment {terms.fragment}, layout {terms.layout}, max_norm_ratio {terms.max_norm_ratio}, merge {terms.merge}"
    )
