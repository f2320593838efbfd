"""The tables of docs/protocol.md that are made from the code: phases, and the messages.

python -m diloco.swarm.protocol.table       writes them into docs/protocol.md
"""

import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from diloco.swarm.protocol.joining import JOIN_MEANING, JOIN_TRANSITIONS
from diloco.swarm.protocol.leading import LeadPhase
from diloco.swarm.protocol.membership import PEER_MEANING, PEER_TRANSITIONS
from diloco.swarm.protocol.messages import ANSWERS
from diloco.swarm.protocol.round import MEANING, TRANSITIONS
from diloco.swarm.protocol.wire import PeerMessage

BEGIN = "<!-- made by python -m diloco.swarm.protocol.table -->"
END = "<!-- end of what is made -->"
Phase = TypeVar("Phase", bound=Enum)


def tables() -> str:
    requests = [(request.__name__, _meaning(request), _names(answers)) for request, answers in ANSWERS.items()]
    leading = ", ".join(f"*{phase.value}*" for phase in LeadPhase)
    return "\n\n".join(
        [
            "A worker's round (`protocol/round.py`):",
            _phases(MEANING, TRANSITIONS),
            f"The leader's side of it, as `diloco status` shows it (`protocol/leading.py`): {leading}.",
            "A worker that joins (`protocol/joining.py`):",
            _phases(JOIN_MEANING, JOIN_TRANSITIONS),
            "A peer, as a member sees it (`protocol/membership.py`, `protocol/heartbeats.py`):",
            _phases(PEER_MEANING, PEER_TRANSITIONS),
            _table(("message", "meaning", "answers"), requests),
        ]
    )


def _phases(meaning: Mapping[Phase, str], transitions: Mapping[Phase, Mapping[Phase, str]]) -> str:
    rows = [
        (
            phase.value,
            meaning[phase],
            "; ".join(f"**{after.value}**: {why}" for after, why in follow.items()) or "the end",
        )
        for phase, follow in transitions.items()
    ]
    return _table(("phase", "meaning", "what follows"), rows)


def insert(page: str) -> str:
    """Return the page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _meaning(message: type[PeerMessage]) -> str:
    text = " ".join((message.__doc__ or "").split()).removesuffix(".")
    return text.replace(" (audit/mean_check.py)", "").replace(" (quorum.py)", "")


def _names(messages: Iterable[type[PeerMessage]]) -> str:
    return ", ".join(message.__name__ for message in messages) or "data"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/protocol.md")
    path.write_text(insert(path.read_text(encoding="utf-8")), encoding="utf-8")
