"""The tokens of a swarm's run: one count, whatever single members missed or claim."""

from diloco.engines.note import Note
from diloco.training.swarm.token_counts import TokenCounts


def confirming(*counts: dict[int, int]) -> list[Note]:
    return [Note(tokens=one) for one in counts]


def test_at_the_end_one_that_missed_a_round_has_the_others_count() -> None:
    counts = TokenCounts()
    counts.by_worker = {0: 10, 3: 5}
    counts.agree(confirming({0: 20, 3: 5}, {0: 20, 3: 5}, {0: 10, 3: 5}))
    assert counts.by_worker == {0: 20, 3: 5} and counts.total == 25


def test_at_the_end_one_of_three_that_lies_changes_no_count() -> None:
    counts = TokenCounts()
    counts.agree(confirming({0: 20}, {0: 20}, {0: 10**15, 7: 10**15}))
    assert counts.by_worker == {0: 20}


def test_a_worker_that_comes_back_goes_on_from_what_is_in_the_run() -> None:
    counts = TokenCounts()
    counts.read_state_note(Note(tokens={4: 100}))
    counts.begin(4)
    assert counts.in_note(Note(), 30) == Note(own_tokens=130, tokens={4: 100})
    counts.after_round({4: Note(own_tokens=130), 1: Note(own_tokens=70, tokens={4: 10**9})})
    assert counts.by_worker == {4: 130, 1: 70}, "a worker's own word counts, not another's about it"


def test_what_was_saved_is_counted_on() -> None:
    before, after = TokenCounts(), TokenCounts()
    before.by_worker, before.earlier = {2: 7, 10: 3}, 5
    after.load_state_dict(before.state_dict())
    assert (after.by_worker, after.earlier) == ({2: 7, 10: 3}, 5)
