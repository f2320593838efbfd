"""The tokens of a swarm's run: one count, whatever single members missed or claim."""

from diloco.engines.note import Note
from diloco.training.swarm.token_counts import TokenCounts


def confirming(*counts: dict[int, int]) -> list[Note]:
    return [Note(tokens=one) for one in counts]


def test_at_the_end_one_that_missed_a_round_has_the_others_count() -> None:
    counts = TokenCounts()
    counts.by_worker = {0: 10, 3: 5}
    counts.agree(confirming({0: 20, 3: 5}, {0: 20, 3: 5}, {0: 10, 3: 5}), 100)
    assert counts.by_worker == {0: 20, 3: 5} and counts.total == 25


def test_at_the_end_one_of_three_that_lies_changes_no_count() -> None:
    counts = TokenCounts()
    counts.agree(confirming({0: 20}, {0: 20}, {0: 10**15, 7: 10**15}), 100)
    assert counts.by_worker == {0: 20}


def test_a_worker_that_comes_back_goes_on_from_what_is_in_the_run() -> None:
    counts = TokenCounts()
    counts.read_state_note(Note(tokens={4: 100}), 1000)
    counts.begin(4)
    assert counts.in_note(Note(), 30) == Note(own_tokens=130, tokens={4: 100})
    counts.after_round({4: Note(own_tokens=130), 1: Note(own_tokens=70, tokens={4: 10**9})}, 1000)
    assert counts.by_worker == {4: 130, 1: 70}, "a worker's own word counts, not another's about it"


def test_no_worker_counts_for_more_tokens_than_all_steps_so_far_have_and_one_that_says_so_is_named_once() -> None:
    counts = TokenCounts()
    honest, false = Note(own_tokens=400), Note(own_tokens=1 << 53)
    assert counts.after_round({0: honest, 3: false}, 400) == {3: 1 << 53}
    assert counts.by_worker == {0: 400, 3: 400}
    assert counts.after_round({3: false}, 500) == {} and counts.total == 900
    assert counts.after_round({3: Note(own_tokens=450)}, 600) == {}
    assert counts.after_round({3: false}, 700) == {3: 1 << 53}, "again"


def test_the_source_of_a_state_and_one_of_two_at_the_end_cannot_tell_more_either() -> None:
    counts = TokenCounts()
    counts.read_state_note(Note(tokens={0: 100, 5: 1 << 53}), 300)
    assert counts.by_worker == {0: 100, 5: 300}
    counts.agree(confirming({0: 100}, {0: 1 << 53}), 400)
    assert counts.by_worker[0] == 400


def test_what_was_saved_is_counted_on() -> None:
    before, after = TokenCounts(), TokenCounts()
    before.by_worker, before.earlier = {2: 7, 10: 3}, 5
    after.load_state_dict(before.state_dict())
    assert (after.by_worker, after.earlier) == ({2: 7, 10: 3}, 5)
