"""The order of batches: a permutation, pure in (seed, worker, position), disjoint between workers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.data.corpus import Corpus, CorpusMeta, shard_name, token_dtype
from diloco.data.order import WorkerBatches, check_disjoint, count_windows, validation_batches, worker_shards
from diloco.data.permutation import Permutation
from diloco.errors import ConfigError, DataError

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
    used = WorkerBatches(corpus, SEQUENCE, batch_size, worker, 3, seed)
    in_one_go = [used.batch(position) for position in positions]
    for position, batch in reversed(list(zip(positions, in_one_go, strict=True))):
        fresh = WorkerBatches(corpus, SEQUENCE, batch_size, worker, 3, seed)
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
            batches = WorkerBatches(corpus, SEQUENCE, 1, worker, workers, seed=5)
            first = epoch * batches.sequences_per_epoch
            positions = range(first, first + batches.sequences_per_epoch)
            seen += [tuple(batches.batch(position)[0].tolist()) for position in positions]
        assert sorted(seen) == sorted(expected)


def test_batches_do_not_depend_on_how_the_sequences_are_grouped_and_may_span_epochs(corpus: Corpus) -> None:
    single = WorkerBatches(corpus, SEQUENCE, 1, 1, 3, seed=9)
    grouped = WorkerBatches(corpus, SEQUENCE, 8, 1, 3, seed=9)
    count = 3 * single.sequences_per_epoch // 8
    assert single.sequences_per_epoch % 8 != 0, "some batch must span two epochs"
    in_groups = np.concatenate([grouped.batch(position) for position in range(count)])
    one_by_one = np.concatenate([single.batch(position) for position in range(8 * count)])
    assert np.array_equal(in_groups, one_by_one)


def test_seeds_workers_and_epochs_give_different_orders(corpus: Corpus) -> None:
    def order(seed: int, epoch: int) -> bytes:
        batches = WorkerBatches(corpus, SEQUENCE, 1, 0, 1, seed)
        n = batches.sequences_per_epoch
        return np.concatenate([batches.batch(epoch * n + i) for i in range(n)]).tobytes()

    assert len({order(0, 0), order(0, 1), order(1, 0), order(1, 1)}) == 4


def test_epoch_counts_the_completed_passes(corpus: Corpus) -> None:
    batches = WorkerBatches(corpus, SEQUENCE, 3, 0, 1, seed=0)
    n = batches.sequences_per_epoch
    assert [batches.epoch(p) for p in (0, (n - 1) // 3, -(-n // 3), -(-2 * n // 3))] == [0, 0, 1, 2]


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
    with pytest.raises(DataError, match=r"\[6\] are read by nobody"):
        check_disjoint(corpus, 2, lambda shards, worker, workers: range(worker, shards - 1, workers))
    with pytest.raises(DataError, match=r"\[7\] do not exist"):
        check_disjoint(corpus, 2, lambda shards, worker, workers: range(worker, shards + 1, workers))


def test_more_workers_than_shards_are_refused_with_the_remedy(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"8 workers cannot share 7 shards.*--data.shards 8"):
        check_disjoint(corpus, 8)
    with pytest.raises(ConfigError, match="8 workers cannot share 7 shards"):
        WorkerBatches(corpus, SEQUENCE, 1, 0, 8, seed=0)


def test_a_corpus_smaller_than_a_batch_is_refused_with_its_numbers(corpus: Corpus) -> None:
    WorkerBatches(corpus, SEQUENCE, 10, 0, 7, seed=0)  # 41 tokens: just ten windows
    with pytest.raises(DataError, match=r"worker 0 of 7 has 10 sequences of 4 tokens.*less than one batch of 11"):
        WorkerBatches(corpus, SEQUENCE, 11, 0, 7, seed=0)


def test_a_worker_with_an_empty_shard_still_reads_its_other_shards(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [0, 9, 0, 9], 9)
    batches = WorkerBatches(corpus, SEQUENCE, 4, 0, 1, seed=0)
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
