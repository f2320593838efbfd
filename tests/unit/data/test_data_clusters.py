"""Shards that are clusters: documents of a kind end up together, sizes become weights, and nothing else changes."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.preparation import partitions
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.partitions import Clusters, FeatureModel, sample
from diloco.data.preparation.passages import Passage
from diloco.data.tokenizer import Tokenizer
from diloco.errors import DataError
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import save_model
from diloco.models.native.transformer import Transformer
from diloco.training.features import feature_model

DOMAINS = {"law": "court statute appeal clause", "sea": "wave sail anchor storm", "code": "def return import self"}
DOCUMENTS = {"law": 60, "sea": 30, "code": 15}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains with words of their own and common ones, a file each."""
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("domains")
    for name, words in DOMAINS.items():
        own = words.split()
        rows = [" ".join(rng.choices([*own, *own, "the", "of", "and"], k=60)) for _ in range(DOCUMENTS[name])]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": row, "kind": f"a {name}"}) + "\n" for row in rows)
        )
    return folder


@pytest.fixture(scope="module")
def model(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny transformer in a folder, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train([path.read_text() for path in texts.iterdir()], 300)
    tokenizer.save(folder / "source.json")
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_sequence_length=48,
        tie_embeddings=True,
    )
    save_model(
        Transformer(config), folder / "model", tokenizer_path=folder / "source.json", end_of_text="<|endoftext|>"
    )
    return folder / "model"


@pytest.fixture
def config(texts: Path, model: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(
        source=str(texts),
        vocab_size=400,
        shards=3,
        validation_fraction=0.1,
        partition="clusters",
        feature_model=str(model),
        cache_dir=str(tmp_path / "cache"),
    )


def texts_of(corpus: Corpus, shard: int) -> list[str]:
    text = Tokenizer.load(corpus.tokenizer_path).decode(corpus.shard(shard).tolist())
    return text.split("<|endoftext|>")[:-1]


def test_each_domain_ends_up_in_a_shard_of_its_own_and_the_purity_is_that_of_the_files(config: DataConfig) -> None:
    corpus = prepare(config, load_features=feature_model)
    assert corpus.meta.partition == "clusters"
    assert corpus.meta.label_tokens.keys() == DOMAINS.keys()
    assert min(corpus.meta.purity.values()) > 0.9
    assert corpus.meta.overall_purity is not None and corpus.meta.overall_purity > 0.9
    for name, words in DOMAINS.items():
        own = set(words.split())
        held = [sum(bool(own & set(text.split())) for text in texts_of(corpus, shard)) for shard in range(3)]
        assert max(held) / sum(held) == pytest.approx(corpus.meta.purity[name], abs=0.05)
    largest = {name: max(range(3), key=tokens.__getitem__) for name, tokens in corpus.meta.label_tokens.items()}
    assert len(set(largest.values())) == 3


def test_sizes_of_shards_are_the_workers_weights(config: DataConfig) -> None:
    corpus = prepare(config, load_features=feature_model)
    sizes = corpus.meta.shard_tokens
    assert max(sizes) > 2.5 * min(sizes)  # 60 documents against 15
    assert [corpus.worker_weight([shard]) for shard in range(3)] == list(sizes)
    assert corpus.worker_weight([0, 2]) == sizes[0] + sizes[2]
    totals = {label: sum(tokens) for label, tokens in corpus.meta.label_tokens.items()}
    assert sum(totals.values()) == corpus.train_tokens


def test_validation_is_the_same_split_whatever_the_partition(config: DataConfig) -> None:
    clustered = prepare(config, load_features=feature_model)
    even = prepare(replace(config, partition="iid", feature_model=None))
    assert np.array_equal(clustered.validation(), even.validation())
    assert sorted(text for shard in range(3) for text in texts_of(clustered, shard)) == sorted(
        text for shard in range(3) for text in texts_of(even, shard)
    )
    assert even.meta.label_tokens == {} and even.meta.overall_purity is None
    labelled = prepare(replace(config, partition="iid", feature_model=None, label_field="kind"))
    assert labelled.meta.overall_purity == pytest.approx(1 / 3, abs=0.1)
    assert max(even.meta.shard_tokens) < 1.1 * min(even.meta.shard_tokens)


def test_labels_come_from_a_field_where_one_is_named(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = prepare(replace(config, label_field="kind"), load_features=feature_model)
    assert corpus.meta.label_tokens.keys() == {"a law", "a sea", "a code"}
    monkeypatch.setattr("diloco.data.preparation.builder.MAX_LABELS", 2)
    with pytest.raises(DataError, match=r"more than 2 different labels \(data\.label_field 'kind'\)"):
        prepare(replace(config, label_field="kind", shards=2), load_features=feature_model)


def test_clusters_are_the_same_after_an_interruption_and_not_found_twice(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare(replace(config, cache_dir=str(tmp_path / "other")), load_features=feature_model)
    monkeypatch.setattr("diloco.data.preparation.builder.COMMIT_SECONDS", 0.0)
    monkeypatch.setattr("diloco.data.preparation.builder.ENCODE_BATCH_BYTES", 4000)

    class Killed(BaseException):
        pass

    def fragile(folder: Path) -> FeatureModel:
        whole = feature_model(folder)
        calls = 0

        def features(tokens: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
            nonlocal calls
            calls += 1
            if calls == 6:
                raise Killed
            return whole.features(tokens)

        return replace(whole, features=features)

    with pytest.raises(Killed):
        prepare(config, load_features=fragile)
    (working,) = Path(str(config.cache_dir)).glob(".*.preparing")
    assert (working / "clusters.npz").exists() and json.loads((working / "state.json").read_text())["walk"]["taken"]
    monkeypatch.setattr("diloco.data.preparation.partitions.find_clusters", lambda *_: pytest.fail("found again"))
    corpus = prepare(config, load_features=feature_model)
    assert corpus.meta.shard_tokens == expected.meta.shard_tokens
    assert corpus.digest == expected.digest
    assert corpus.meta.label_tokens == expected.meta.label_tokens
    assert sorted(p.name for p in corpus.folder.iterdir()) == sorted(p.name for p in expected.folder.iterdir())


def test_another_model_is_another_corpus(config: DataConfig, model: Path, tmp_path: Path) -> None:
    first = prepare(config, load_features=feature_model)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    second = prepare(replace(config, feature_model=str(copy)), load_features=feature_model)
    assert second.folder != first.folder and second.digest == first.digest


def test_features_are_the_mean_of_the_last_layer_over_the_tokens_that_are_there(model: Path) -> None:
    features = feature_model(model)
    assert features.length == 48
    long, short = features.compute(["court statute appeal " * 30, "sail"])
    alone = features.compute(["sail"])[0]
    np.testing.assert_allclose(short, alone, atol=1e-5)  # neither padding nor company changes it
    from diloco.models.native.model import load_model

    transformer: Transformer = load_model(model)
    tokens = torch.tensor([features.tokenizer.encode("sail")])
    with torch.no_grad():
        np.testing.assert_allclose(alone, transformer.model(tokens)[0].mean(0).numpy(), atol=1e-5)
    assert not np.allclose(long, short)


def test_a_passage_without_any_token_has_features_too(model: Path) -> None:
    assert np.isfinite(feature_model(model).compute([""])).all()


def test_what_is_no_model_is_refused_by_name(config: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.feature_model '/nowhere' is not a folder"):
        prepare(replace(config, feature_model="/nowhere"), load_features=feature_model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data\.feature_model .*empty.* cannot be used"):
        prepare(replace(config, feature_model=str(tmp_path / "empty")), load_features=feature_model)


def test_more_clusters_than_different_passages_are_refused() -> None:
    features = np.repeat(np.eye(2, dtype=np.float32), 5, 0)
    with pytest.raises(DataError, match=r"10 passages with 2 different features cannot make 3 clusters"):
        Clusters.fit(features, np.ones(10, np.int64), 3)


def test_a_few_long_passages_get_a_cluster_against_many_short_ones() -> None:
    rng = np.random.default_rng(0)
    short = rng.normal(0, 1, (200, 4)).astype(np.float32)
    long = rng.normal(0, 0.1, (4, 4)).astype(np.float32) + np.float32(1.2)
    features = np.concatenate([short, long])
    by_size = Clusters.fit(features, np.array([1] * 200 + [500] * 4), 2)
    assert len(set(by_size.assign(long))) == 1
    own = by_size.assign(long)[0]
    by_count = Clusters.fit(features, np.ones(204, np.int64), 2)
    distance = [np.abs(found.centres[own] * found.scale + found.mean - 1.2).max() for found in (by_size,)]
    assert distance[0] < 0.3
    assert min(np.abs(by_count.centres * by_count.scale + by_count.mean - 1.2).max(1)) > 0.3


def test_the_sample_is_bounded_and_does_not_depend_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "SAMPLE_PASSAGES", 20)
    passages = [Passage(f"passage {i}", i, i % 10 == 0) for i in range(300)]
    found = sample(passages, 48)
    assert len(found) == 20
    assert found == sample(reversed(passages), 48)
    numbers = [size for _, size in found]
    assert all(number % 10 for number in numbers), "validation passages are not looked at"
    assert min(numbers) < 100 and max(numbers) > 200


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.cluster", None)
    with pytest.raises(DataError, match=r"pip install -c constraints\.txt -e '\.\[lab\]'"):
        Clusters.fit(np.eye(3, dtype=np.float32), np.ones(3, np.int64), 2)
