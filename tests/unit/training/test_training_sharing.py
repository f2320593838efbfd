"""Which worker reads which shards in a swarm, what the workers tell each other of it, and what of that is believed."""

import threading
from pathlib import Path

import pytest

from diloco.core.config import SyncConfig
from diloco.data.corpus import Corpus, shard_name
from diloco.data.order import ShardProgress
from diloco.engines.note import Note, read_note
from diloco.errors import EngineError
from diloco.training.batches import ShardReader
from diloco.training.config.run import RunConfig
from diloco.training.swarm.shard_claims import ShardClaims, ShardFetcher, index_among, shards_of
from support.saved_runs import small_config, small_corpus

LENGTH = 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, RunConfig]:
    data, corpus = small_corpus(tmp_path_factory.mktemp("claims"))
    return corpus, small_config(data, SyncConfig(num_inner_steps=4))


def worker(made: tuple[Corpus, RunConfig], number: int, *, own_text: bool = False) -> tuple[ShardClaims, ShardReader]:
    corpus, config = made
    return ShardClaims(corpus, LENGTH, number, own_text=own_text), ShardReader(corpus, config, range(corpus.shards))


@pytest.mark.parametrize("members", [1, 2, 3, 5, 6])
def test_the_shards_of_all_members_are_all_shards_each_once(members: int) -> None:
    numbers = [3 * number + 1 for number in range(members)]  # some have left: numbers have gaps
    shares = [shards_of(6, *index_among(numbers, number)) for number in numbers]
    assert sorted(shard for share in shares for shard in share) == list(range(6))


def test_with_more_members_than_shards_everyone_still_has_one() -> None:
    assert [shards_of(2, place, 5) for place in range(5)] == [[0], [1], [0], [1], [0]]


def test_a_worker_is_among_the_members_even_if_nobody_said_so() -> None:
    assert index_among((0, 1), 7) == (2, 3)
    assert index_among((), 7) == (0, 1)


def test_shards_change_hands_and_go_on_where_their_reader_had_come(made: tuple[Corpus, RunConfig]) -> None:
    first, reader = worker(made, 0)
    for _ in range(7):
        reader.next()
    told = first.note(reader)
    joiner, fresh = worker(made, 1)
    joiner.read_state_note(read_note(told))
    assert joiner.follow((0, 1), fresh)
    assert fresh.shards == [1, 3, 5]
    assert fresh.progress() == {shard: read for shard, read in reader.progress().items() if shard in (1, 3, 5)}
    assert first.follow((0, 1), reader)
    assert reader.shards == [0, 2, 4] and reader.step == 7
    fresh.next()
    first.read_note(1, read_note(joiner.note(fresh)))
    assert first.follow((0,), reader)  # the joiner is gone again
    assert {shard: reader.progress()[shard] for shard in (1, 3, 5)} == fresh.progress()


def test_the_same_roster_changes_nothing(made: tuple[Corpus, RunConfig]) -> None:
    claims, reader = worker(made, 0)
    assert not claims.follow((0,), reader)
    assert claims.follow((0, 1), reader) and not claims.follow((0, 1), reader)


def test_a_worker_with_text_of_its_own_takes_no_part(made: tuple[Corpus, RunConfig]) -> None:
    guest, reader = worker(made, 1, own_text=True)
    assert not guest.follow((0, 1, 2), reader) and guest.missing() == []
    first, its = worker(made, 0)
    first.read_note(1, read_note(guest.note(reader)))
    assert first.follow((0, 1, 2), its)
    assert its.shards == [0, 2, 4]  # of two that share, not of three
    third, _ = worker(made, 2)
    third.read_state_note(read_note(first.note(its)))  # a later joiner hears of it too
    assert third.follow((0, 1, 2), _) and third.shards() == [1, 3, 5]


def test_a_worker_with_another_number_takes_the_share_of_that_number(made: tuple[Corpus, RunConfig]) -> None:
    claims, reader = worker(made, 1)
    assert claims.follow((0, 1), reader) and reader.shards == [1, 3, 5]
    claims.renumber(2)  # after a split another worker is 1
    assert claims.follow((0, 1, 2), reader) and reader.shards == [2, 5]
    guest, its = worker(made, 1, own_text=True)
    guest.renumber(2)
    assert read_note(guest.note(its)).apart == {2}


def test_only_a_worker_itself_says_that_it_has_text_of_its_own(made: tuple[Corpus, RunConfig]) -> None:
    claims, reader = worker(made, 0)
    claims.read_note(2, Note(apart=frozenset({1})))
    claims.follow((0, 1), reader)
    assert reader.shards == [0, 2, 4]


@pytest.mark.parametrize(
    "note",
    [
        Note({0: (0, 10**9)}),
        Note({0: (1 << 50, 0), 999: (5, 0), 2**32 - 1: (1, 1)}, frozenset({0})),
    ],
)
def test_positions_that_no_shard_has_are_passed_over(made: tuple[Corpus, RunConfig], note: Note) -> None:
    claims, reader = worker(made, 0)
    claims.read_note(1, note)
    claims.read_state_note(note)
    claims.follow((0, 1), reader)
    assert set(reader.progress().values()) == {ShardProgress(0, 0)}


def test_a_note_is_small_however_many_shards_there_are(made: tuple[Corpus, RunConfig]) -> None:
    class Many:
        def progress(self) -> dict[int, ShardProgress]:
            return {shard: ShardProgress(10**6, 0) for shard in range(6)}

    claims, _ = worker(made, 0)
    claims.known = {shard: ShardProgress(10**11, 10**11) for shard in range(60_000, 62_000)}
    claims._apart |= set(range(2**31, 2**31 + 5000))
    note = claims.note(Many())  # type: ignore[arg-type]
    assert len(note) < 1 << 14
    assert {0, 5} <= read_note(note).read.keys()


def test_shards_that_are_elsewhere_are_fetched_and_read_once_they_are_here(
    made: tuple[Corpus, RunConfig], tmp_path: Path
) -> None:
    whole, config = made
    for path in whole.folder.iterdir():
        if path.name not in (shard_name(3), shard_name(5)):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    corpus = Corpus.open(tmp_path, allow_missing_shards=True)
    claims, reader = ShardClaims(corpus, LENGTH, 1, own_text=False), ShardReader(corpus, config, [1])
    claims.follow((0, 1), reader)
    assert reader.shards == [1] and claims.missing() == [3, 5]
    said: list[str] = []
    tried: list[str] = []
    done = threading.Event()

    def fetch(name: str, path: Path) -> None:
        tried.append(name)
        if name == shard_name(5) and tried.count(name) == 1:
            done.set()
            raise EngineError("nobody has it")
        path.write_bytes((whole.folder / name).read_bytes())
        if name == shard_name(5):
            done.set()

    fetcher = ShardFetcher(corpus, fetch, lambda event: said.append(event.type))
    for expected in ([1, 3], [1, 3, 5]):
        done.clear()
        fetcher.start(claims.missing())
        assert done.wait(10) and fetcher._thread is not None
        fetcher._thread.join(10)
        assert fetcher.arrived.is_set()
        claims.take(reader)
        assert reader.shards == expected
        assert not fetcher.may_try  # not at once again
    assert said == ["shard_fetched", "shards_not_fetched", "shard_fetched"]


@pytest.mark.parametrize("members", [2, 3, 4, 9])
def test_every_shard_is_fetched_by_two_members_so_that_none_is_lost_with_the_founder(
    made: tuple[Corpus, RunConfig], tmp_path: Path, members: int
) -> None:
    """The founder, 0, has all of them; the others have none before they fetch."""
    whole, _ = made
    roster, holders = tuple(range(members)), {shard: {0} for shard in range(whole.shards)}
    for worker in roster[1:]:
        (tmp_path / str(worker)).mkdir()
        claims = ShardClaims(Corpus(tmp_path / str(worker), whole.meta), LENGTH, worker, own_text=False)
        claims.roster = roster
        for shard in claims.missing():
            holders[shard].add(worker)
    assert all(len(found) >= 2 for found in holders.values()), holders
    if members > 3:
        assert all(found != {0} for found in holders.values())
