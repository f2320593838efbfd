"""Shards by label: each label is in one shard whole, shards are balanced, and a worker weighs as much as it reads."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.preparation import builder
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.partitions import share_out
from diloco.data.sources.registry import open_source
from diloco.data.tokenizer import Tokenizer
from diloco.errors import ConfigError, DataError
from diloco.training.config.run import RunConfig
from diloco.training.processes.start import check_data
from support.event_log import history_of
from support.saved_runs import quick_runs, small_config, train

SIZES = {"law": 90, "sea": 60, "code": 30, "art": 20, "war": 10}


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    rng = random.Random(0)
    rows = [
        {"text": f"{label} {i} " + label * 40, "kind": label} for label, count in SIZES.items() for i in range(count)
    ]
    rng.shuffle(rows)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(
        source=str(tmp_path / "a.jsonl"), label_field="kind", partition="labels", shards=2, vocab_size=300,
        sequence_length=8, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip


def labels_of(corpus: Corpus, shard: int) -> Counter[str]:
    """By the text itself: each document begins with its label."""
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    tokens = np.asarray(corpus.shard(shard))
    parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.end_of_text) + 1)[:-1]
    return Counter(tokenizer.decode(part.tolist()).split()[0] for part in parts)


def test_every_label_is_in_one_shard_and_the_shards_are_balanced(config: DataConfig) -> None:
    corpus = prepare(config)
    first, second = labels_of(corpus, 0), labels_of(corpus, 1)
    assert first.keys() | second.keys() == SIZES.keys() and not first.keys() & second.keys()
    assert min(corpus.meta.shard_tokens) > 0.8 * max(corpus.meta.shard_tokens)
    assert corpus.meta.overall_purity == 1.0 and corpus.meta.partition == "labels"
    shards = corpus.meta.event()["label_shards"]
    assert {label for label, shard in shards.items() if shard == 0} == first.keys()


def test_labels_are_shared_out_the_largest_first() -> None:
    assert share_out({"a": 1, "b": 5, "c": 3, "d": 3}, 2) == {"b": 0, "c": 1, "d": 1, "a": 0}
    assert share_out({"a": 1, "b": 2}, 4) == {"b": 0, "a": 1}


def test_the_validation_text_is_the_one_of_other_partitions(config: DataConfig) -> None:
    other = prepare(replace(config, partition="iid"))
    assert (prepare(config).folder / "validation.bin").read_bytes() == (other.folder / "validation.bin").read_bytes()


def test_an_interrupted_preparation_continues_with_the_same_shards(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = prepare(replace(config, cache_dir=str(tmp_path / "other"))).digest
    monkeypatch.setattr(builder, "ENCODE_BATCH_BYTES", 1000)
    monkeypatch.setattr(builder, "COMMIT_SECONDS", 0.0)
    commits, commit = [0], builder.Preparation._commit

    def die(self: builder.Preparation, passages: object) -> None:
        commit(self, passages)  # type: ignore[arg-type]
        commits[0] += 1
        if commits[0] == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builder.Preparation, "_commit", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    with monkeypatch.context() as patch:
        patch.setattr("diloco.data.preparation.partitions.find_labels", None)  # they are not counted again
        assert prepare(config).digest == expected


def test_documents_without_labels_or_with_one_only_are_refused_with_the_remedy(
    config: DataConfig, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"the documents have no labels.*--data\.label_field"):
        prepare(replace(config, label_field=None))
    (tmp_path / "one.jsonl").write_text('{"text": "a b c d", "kind": "law"}\n{"text": "e f g h", "kind": "law"}\n')
    with pytest.raises(DataError, match=r"at least two labels, and found: law"):
        prepare(replace(config, source=str(tmp_path / "one.jsonl")))
    with pytest.raises(ConfigError, match=r"with engine = swarm the parts change hands"):
        RunConfig(engine="swarm", workers=1, data=config)


def test_names_of_files_are_labels_too(config: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for label, count in SIZES.items():
        (folder / f"{label}.txt").write_text("".join(f"{label} {i} " + label * 40 + "\n" for i in range(count)))
    corpus = prepare(replace(config, source=str(folder), label_field=None))
    assert corpus.meta.label_tokens.keys() == SIZES.keys() and corpus.meta.overall_purity == 1.0


def test_more_workers_than_labels_are_refused_with_the_reason(config: DataConfig) -> None:
    wide = replace(config, shards=8)
    corpus = prepare(wide)
    assert sum(tokens > 0 for tokens in corpus.meta.shard_tokens) == len(SIZES)
    run = RunConfig(workers=6, data=wide)
    with pytest.raises(DataError, match=r"data\.partition = labels: 5 labels, each in one shard"):
        check_data(run, corpus, 6)


def test_workers_weigh_as_much_as_their_labels_have_text_and_the_run_says_which_worker_reads_which(
    config: DataConfig, tmp_path: Path
) -> None:
    wide = replace(config, shards=3)
    corpus = prepare(wide)
    run = small_config(wide, SyncConfig(num_inner_steps=3), steps=3)
    with quick_runs():
        workers = train(tmp_path / "run", run, corpus)
    tokens = corpus.meta.shard_tokens
    weights = [worker.mode.averager.weight for worker in workers]  # type: ignore[union-attr]
    assert weights == [float(tokens[0] + tokens[2]), float(tokens[1])]
    events = [
        {"type": "worker_started", "time": 0.0, "worker": 0, "workers": 2},
        {"type": "corpus", "time": 0.0, "worker": 0, **corpus.meta.event(), "skipped": {"unreadable rows": 3}},
    ]
    notes = history_of(events).notes
    assert "3 unreadable rows" in notes.lines[0]
    assert notes.lines[1].startswith("worker 0 reads law") and notes.lines[2].startswith("worker 1 reads sea")


def test_a_label_that_is_not_unicode_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "\\ud800"}\n')
    source = open_source(DataConfig(source=str(path), label_field="label"))
    with pytest.raises(DataError, match=r"line 2: field 'label' is not Unicode text"):
        list(source.documents())
