"""What the page says of an event."""

from typing import Any

import pytest

from diloco.dashboard.notes import note_of


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"type": "minority", "here": 1, "members": 4}, "1 of 4 members are here"),
        ({"type": "warm_start", "worker": 2, "step": 30, "steps": 200}, "worker 2 waits for the warm start: step 30"),
        ({"type": "diverged", "worker": 1, "rounds": 3, "tokens": 4096}, "3 rounds and 4,096 tokens are lost"),
    ],
)
def test_the_page_tells_what_the_terminal_tells_of_a_split_and_of_a_warm_start(
    event: dict[str, Any], words: str
) -> None:
    note = note_of(event)
    assert note is not None
    assert words in note[1]
