"""The order of batches: pure in (seed, shards, progress, position), disjoint between workers whatever their number."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.data.corpus import Corpus, CorpusMeta, shard_name, token_dtype
from diloco.data.order import (
    Permutation,
    ShardProgress,
    WorkerBatches,
    check_disjoint,
    count_windows,
    validation_batches,
    worker_shards,
)
from diloco.errors import ConfigError, DataError
from support.shard_progress import merge_progress

SEQUENCE = 4


def write_corpus(folder: Path, shard_tokens: Sequence[int], validation_tokens: int) -> Corpus:
    """Tokens are numbered through all shards, so that a token says where it comes from."""
    folder.mkdir()
    meta = CorpusMeta(
        vocab_size=60_000,
        end_of_text=0,
        shard_tokens=tuple(shard_tokens),
        validation_tokens=validation_tokens,
        documents=1,
        characters=1,
        train_bytes=1,
        validation_bytes=1,
        unigram_perplexity=1.0,
        tokenizer_bytes=2,
        digest="",
        skipped={},
    )
    first = 0
    for shard, tokens in enumerate(shard_tokens):
        np.arange(first, first + tokens).astype(token_dtype(meta.vocab_size)).tofile(folder / shard_name(shard))
        first += tokens
    np.arange(validation_tokens).astype(token_dtype(meta.vocab_size)).tofile(folder / "validation.bin")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "meta.json").write_text(meta.to_json())
    return Corpus.open(folder)


def batches_of(
    corpus: Corpus,
    batch_size: int,
    worker: int,
    workers: int,
    seed: int,
    progress: dict[int, ShardProgress] | None = None,
) -> WorkerBatches:
    shards = worker_shards(corpus.shards, worker, workers)
    return WorkerBatches(corpus, SEQUENCE, batch_size, shards, seed, progress)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("order") / "c", [41, 45, 43, 60, 44, 49, 51], 30)


@given(size=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 1000))
@example(size=1, seed=0, epoch=0)
@example(size=2, seed=0, epoch=0)
@example(size=4096, seed=0, epoch=0)
@example(size=4097, seed=0, epoch=0)
@settings(deadline=None, max_examples=60)
def test_permutation_is_a_bijection_of_any_size(size: int, seed: int, epoch: int) -> None:
    images = Permutation(size, seed, 0, epoch)(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_permutation_of_a_huge_range_stays_inside_and_collides_nowhere() -> None:
    size = 3 * 10**12
    images = Permutation(size, 1)(np.arange(10_000) * 300_000_000)
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == 10_000


def test_permutation_looks_random_and_differs_by_each_part_of_its_key() -> None:
    identity = np.arange(10_000)
    orders = [Permutation(10_000, *key)(identity) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    for i, order in enumerate(orders):
        # Chance alone stays within 0.05 at this size (five standard deviations).
        assert abs(np.corrcoef(order, identity)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
        for other in orders[:i]:
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.05


def test_permutation_sends_the_first_element_everywhere() -> None:
    firsts = np.array([Permutation(16, seed)(np.zeros(1, np.int64))[0] for seed in range(3200)])
    counts = np.bincount(firsts, minlength=16)
    assert counts.min() > 130
    assert counts.max() < 270


@given(
    seed=st.integers(0, 2**63),
    worker=st.integers(0, 2),
    batch_size=st.integers(1, 8),
    positions=st.lists(st.integers(0, 10_000), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=50)
def test_batch_is_a_pure_function_of_seed_worker_and_position(
    corpus: Corpus, seed: int, worker: int, batch_size: int, positions: list[int]
) -> None:
    used = batches_of(corpus, batch_size, worker, 3, seed)
    in_one_go = [used.batch(position) for position in positions]
    for position, batch in reversed(list(zip(positions, in_one_go, strict=True))):
        fresh = batches_of(corpus, batch_size, worker, 3, seed)
        assert np.array_equal(fresh.batch(position), batch)
        assert batch.shape == (batch_size, SEQUENCE + 1)
        assert batch.dtype == np.int64


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_an_epoch_of_all_workers_visits_every_window_of_every_shard_exactly_once(corpus: Corpus, workers: int) -> None:
    expected: list[tuple[int, ...]] = []
    for shard in range(corpus.shards):
        tokens = corpus.shard(shard)
        expected += [
            tuple(int(t) for t in tokens[w * SEQUENCE : w * SEQUENCE + SEQUENCE + 1])
            for w in range(count_windows(len(tokens), SEQUENCE))
        ]
    for epoch in (0, 1):
        seen: list[tuple[int, ...]] = []
        for worker in range(workers):
            batches = batches_of(corpus, 1, worker, workers, seed=5)
            first = epoch * batches.sequences_per_epoch
            positions = range(first, first + batches.sequences_per_epoch)
            seen += [tuple(batches.batch(position)[0].tolist()) for position in positions]
        assert sorted(seen) == sorted(expected)


def test_batches_do_not_depend_on_how_the_sequences_are_grouped_and_may_span_epochs(corpus: Corpus) -> None:
    single = batches_of(corpus, 1, 1, 3, seed=9)
    grouped = batches_of(corpus, 8, 1, 3, seed=9)
    count = 3 * single.sequences_per_epoch // 8
    assert single.sequences_per_epoch % 8 != 0, "some batch must span two epochs"
    in_groups = np.concatenate([grouped.batch(position) for position in range(count)])
    one_by_one = np.concatenate([single.batch(position) for position in range(8 * count)])
    assert np.array_equal(in_groups, one_by_one)


def test_seeds_workers_and_epochs_give_different_orders(corpus: Corpus) -> None:
    def order(seed: int, epoch: int) -> bytes:
        batches = batches_of(corpus, 1, 0, 1, seed)
        n = batches.sequences_per_epoch
        return np.concatenate([batches.batch(epoch * n + i) for i in range(n)]).tobytes()

    assert len({order(0, 0), order(0, 1), order(1, 0), order(1, 1)}) == 4


def windows_of(corpus: Corpus) -> list[int]:
    return [count_windows(corpus.meta.shard_tokens[shard], SEQUENCE) for shard in range(corpus.shards)]


class Reading:
    """All windows that a run reads while its workers change, by the epoch of their shard."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus, self.seed = corpus, seed
        self.progress: dict[int, ShardProgress] = {shard: ShardProgress() for shard in range(corpus.shards)}
        firsts = np.cumsum([0, *corpus.meta.shard_tokens])
        self.firsts = firsts
        self.seen: dict[int, list[int]] = {shard: [] for shard in range(corpus.shards)}

    def read(self, workers: int, batch_size: int, batches: Sequence[int]) -> None:
        """Worker i of `workers` takes batches[i] batches."""
        progresses = []
        for worker in range(workers):
            worker_batches = batches_of(self.corpus, batch_size, worker, workers, self.seed, self.progress)
            for position in range(batches[worker]):
                for window in worker_batches.batch(position):
                    shard = int(np.searchsorted(self.firsts, window[0], side="right")) - 1
                    assert shard in worker_batches.shards
                    self.seen[shard].append(int(window[0]))
            progresses.append(worker_batches.progress(batches[worker]))
        self.progress = merge_progress(progresses)

    def check(self) -> None:
        for shard, windows in enumerate(windows_of(self.corpus)):
            seen, (epoch, consumed) = self.seen[shard], self.progress[shard]
            assert len(seen) == epoch * windows + consumed
            everything = {int(self.firsts[shard]) + SEQUENCE * window for window in range(windows)}
            for whole in range(epoch):
                assert set(seen[whole * windows : (whole + 1) * windows]) == everything
            rest = seen[epoch * windows :]
            assert len(set(rest)) == len(rest)
            assert set(rest) <= everything


@given(data=st.data(), seed=st.integers(0, 2**63))
@settings(deadline=None, max_examples=60)
def test_any_changes_of_the_number_of_workers_read_every_window_once_per_epoch_of_its_shard(
    corpus: Corpus, data: st.DataObject, seed: int
) -> None:
    reading = Reading(corpus, seed)
    for _ in range(data.draw(st.integers(1, 6), label="changes")):
        workers = data.draw(st.integers(1, corpus.shards), label="workers")
        batch_size = data.draw(st.integers(1, 10), label="batch_size")
        # Workers need not be at the same step: a slow one has taken less.
        batches = data.draw(st.lists(st.integers(0, 12), min_size=workers, max_size=workers), label="batches")
        reading.read(workers, batch_size, batches)
        reading.check()


def test_nothing_repeats_before_all_shards_are_read_when_workers_of_one_speed_change(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [41] * 6, 30)  # ten windows each
    reading = Reading(corpus, seed=3)
    for workers, batches in [(2, 7), (3, 2), (6, 1), (1, 34)]:  # 14 + 6 + 6 + 34: all sixty
        reading.read(workers, 1, [batches] * workers)
    assert Counter(start for seen in reading.seen.values() for start in seen).most_common(1)[0][1] == 1
    assert set(reading.progress.values()) == {ShardProgress(0, 10)}
    reading.read(1, 1, [1])
    reading.check()
    assert sorted(reading.progress.values())[-1] == ShardProgress(1, 1)


@given(position=st.integers(0, 40), workers=st.integers(1, 7), batch_size=st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_going_on_from_the_start_and_the_position_equals_no_interruption(
    corpus: Corpus, position: int, workers: int, batch_size: int
) -> None:
    start = {shard: ShardProgress(shard % 3, shard) for shard in range(corpus.shards)}
    through = batches_of(corpus, batch_size, 0, workers, 1, start)
    expected = [through.batch(p) for p in range(position + 3)][position:]
    restored = json.loads(json.dumps(start))  # as a checkpoint keeps it
    resumed = batches_of(corpus, batch_size, 0, workers, 1, {int(s): ShardProgress(*restored[s]) for s in restored})
    assert np.array_equal(np.stack([resumed.batch(position + i) for i in range(3)]), np.stack(expected))
    assert resumed.progress(position) == through.progress(position)


def test_a_later_epoch_does_not_depend_on_how_the_first_was_divided(corpus: Corpus) -> None:
    fresh = batches_of(corpus, 1, 1, 3, 9, {shard: ShardProgress(1, 0) for shard in range(corpus.shards)})
    through = batches_of(corpus, 1, 1, 3, seed=9)
    n = through.sequences_per_epoch
    assert all(np.array_equal(through.batch(n + i), fresh.batch(i)) for i in range(n))


def test_shards_are_mixed_in_proportion_to_what_is_left_of_them(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [1 + SEQUENCE * 3000, 1 + SEQUENCE * 1000], 30)
    start = {0: ShardProgress(0, 1000), 1: ShardProgress(4, 500)}
    progress = batches_of(corpus, 1000, 0, 1, 0, start).progress(1)
    # 4 of 5 draws on average; 720..880 is more than six standard deviations
    assert 720 < progress[0].consumed - 1000 < 880
    assert progress[0].consumed - 1000 + progress[1].consumed - 500 == 1000


def test_long_jumps_count_the_same_as_single_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "c", [1 + SEQUENCE * 300, 1 + SEQUENCE * 500], 30)
    jumping, walking = batches_of(corpus, 7, 0, 1, 2), batches_of(corpus, 7, 0, 1, 2)
    monkeypatch.setattr("diloco.data.order._COUNT_AT_ONCE", 64)
    batches = [walking.batch(position) for position in range(200)]
    for position in (199, 3, 120, 114, 113, 0):
        assert np.array_equal(jumping.batch(position), batches[position])
        assert jumping.progress(position) == batches_of(corpus, 7, 0, 1, 2).progress(position)


def test_progress_that_cannot_be_is_refused(corpus: Corpus) -> None:
    with pytest.raises(DataError, match=r"the progress of shard 0 is .*consumed=11.*has 10 windows"):
        batches_of(corpus, 1, 0, 7, 0, {0: ShardProgress(0, 11)})
    with pytest.raises(DataError, match="the progress of shard 3 is missing"):
        batches_of(corpus, 1, 0, 3, 0, {0: ShardProgress(0, 1)})


@given(shards=st.integers(1, 64), data=st.data())
@settings(deadline=None)
def test_assignment_gives_every_shard_to_exactly_one_worker(shards: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, shards))
    dealt = [shard for worker in range(workers) for shard in worker_shards(shards, worker, workers)]
    assert sorted(dealt) == list(range(shards))


def test_check_disjoint_accepts_the_real_assignment(corpus: Corpus) -> None:
    for workers in range(1, corpus.shards + 1):
        check_disjoint(corpus, workers)


def test_check_disjoint_refuses_shared_forgotten_and_invented_shards(corpus: Corpus) -> None:
    with pytest.raises(DataError, match="shard 0 is read by workers 0 and 1"):
        check_disjoint(corpus, 2, lambda shards, _worker, _workers: range(shards))
    with pytest.raises(DataError, match=r"\[6\] have no reader"):
        check_disjoint(corpus, 2, lambda shards, worker, workers: range(worker, shards - 1, workers))
    with pytest.raises(DataError, match=r"\[7\] do not exist"):
        check_disjoint(corpus, 2, lambda shards, worker, workers: range(worker, shards + 1, workers))


def test_more_workers_than_shards_are_refused_with_the_remedy(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"8 workers cannot share 7 shards.*--data.shards 8"):
        check_disjoint(corpus, 8)
    with pytest.raises(ConfigError, match="8 workers cannot share 7 shards"):
        batches_of(corpus, 1, 0, 8, seed=0)


def test_a_corpus_smaller_than_a_batch_is_refused_with_its_numbers(corpus: Corpus) -> None:
    batches_of(corpus, 10, 0, 7, seed=0)  # 41 tokens: just ten windows
    with pytest.raises(
        DataError, match=r"worker with shards 0 has 10 sequences of 4 tokens.*less than one batch of 11"
    ):
        batches_of(corpus, 11, 0, 7, seed=0)


def test_a_worker_with_an_empty_shard_still_reads_its_other_shards(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [0, 9, 0, 9], 9)
    batches = batches_of(corpus, 4, 0, 1, seed=0)
    assert sorted(batches.batch(0)[:, 0].tolist()) == [0, 4, 9, 13]


@pytest.mark.parametrize("limit", [None, 1, 5, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_validation_windows_are_the_same_set_for_any_number_of_workers(
    corpus: Corpus, limit: int | None, batch_size: int
) -> None:
    def starts(workers: int) -> list[int]:
        found: list[int] = []
        for worker in range(workers):
            for batch in validation_batches(corpus, SEQUENCE, batch_size, worker, workers, limit):
                assert 1 <= len(batch) <= batch_size
                assert np.array_equal(batch - batch[:, :1], np.tile(np.arange(SEQUENCE + 1), (len(batch), 1)))
                found += batch[:, 0].tolist()
        return found

    alone = starts(1)
    assert len(set(alone)) == len(alone) == min(limit or 7, 7)
    assert set(alone) <= {0, 4, 8, 12, 16, 20, 24}
    for workers in (2, 3, 10):  # ten workers for seven windows: some get none
        assert sorted(starts(workers)) == alone


def test_limited_validation_is_spread_over_the_split(corpus: Corpus) -> None:
    (batch,) = validation_batches(corpus, SEQUENCE, 8, limit=2)
    assert batch[:, 0].tolist() == [0, 12]  # windows 0 and 3 of 7, not 0 and 1


def test_validation_without_one_full_window_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [9], SEQUENCE)
    with pytest.raises(DataError, match="validation split has 4 tokens, less than one window of 5"):
        validation_batches(corpus, SEQUENCE, 1)
    with pytest.raises(ConfigError, match="limit"):
        validation_batches(corpus, 1, 1, limit=0)
