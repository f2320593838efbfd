"""A run on shards that are clusters: the workers' contributions weigh as much as their shards have text."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from diloco.cli.main import run as command
from diloco.data.config import DataConfig
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.tokenizer import Tokenizer
from diloco.engines.local import alone
from diloco.history.log import EventLog
from diloco.models.native.config import ModelConfig
from diloco.models.native.model import save_model
from diloco.models.native.transformer import Transformer
from diloco.training.config.run import RunConfig, TrainingConfig
from diloco.training.loop import Training
from support.train_runs import completed, tiny_options, write_text

WORDS = {
    "law": "court statute appeal clause",
    "sea": "wave sail anchor storm",
    "code": "def return import self",
    "food": "soup bread onion butter",
}
DOCUMENTS = {"law": 80, "sea": 20, "code": 40, "food": 20}


def write_domains(folder: Path) -> Path:
    rng = random.Random(0)
    folder.mkdir()
    for name, words in WORDS.items():
        rows = [" ".join(rng.choices([*words.split(), "the"], k=60)) for _ in range(DOCUMENTS[name])]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder


def write_model(folder: Path, texts: Path) -> Path:
    tokenizer = Tokenizer.train([path.read_text() for path in texts.iterdir()], 300)
    tokenizer.save(folder.with_name("tokenizer.json"))
    torch.manual_seed(0)
    shape = ModelConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16,
        max_sequence_length=48, tie_embeddings=True,
    )  # fmt: skip
    path = folder.with_name("tokenizer.json")
    save_model(Transformer(shape), folder, tokenizer_path=path, end_of_text="<|endoftext|>")
    return folder


@pytest.mark.slow
def test_training_on_clusters_weighs_the_workers_by_their_text_and_says_what_is_where(tmp_path: Path) -> None:
    texts = write_domains(tmp_path / "texts")
    model = write_model(tmp_path / "model", texts)
    partition = ("--data.partition=clusters", f"--data.feature_model={model}")
    data = [option for option in tiny_options(texts) if option.startswith("--data.")]
    assert command(["data", "prepare", *data, *partition, "--device=cpu"]) == 0  # the run finds it in the cache
    run = completed(tmp_path / "run", texts, *partition, "--steps=20", "--H=10")
    assert "finding clusters" not in run.output
    (corpus,) = [event for event in run.events if event["type"] == "corpus"]
    assert corpus["partition"] == "clusters"
    assert min(corpus["purity"].values()) > 0.9 and corpus["purity"].keys() == WORDS.keys()
    tokens = corpus["shard_tokens"]
    assert len(tokens) == 4 and max(tokens) > 1.2 * min(tokens)  # words of large domains are single tokens
    told = [event["members"] for event in run.events if event["type"] == "round"]
    weights = [{member["worker"]: member["weight"] for member in members} for members in told]
    worked = [each for each in weights if any(each.values())]  # the last round only confirms
    # For each of the ten inner steps since the round before.
    expected = {0: 10.0 * (tokens[0] + tokens[2]), 1: 10.0 * (tokens[1] + tokens[3])}
    assert len(worked) >= 2 and all(each == expected for each in worked)
    assert len(set(run.summary["anchor_digests"])) == 1


@pytest.mark.parametrize("mode", ["diloco", "data-parallel"])
def test_both_modes_weigh_a_worker_by_its_text_if_the_shards_differ_in_kind(
    mode: Literal["diloco", "data-parallel"], tmp_path: Path
) -> None:
    even = DataConfig(
        source=str(write_text(tmp_path / "text.txt")), vocab_size=280, sequence_length=8, shards=1,
        cache_dir=str(tmp_path),
    )  # fmt: skip
    corpus, training = prepare(even), TrainingConfig(batch_size=2)
    clusters = replace(even, partition="clusters", feature_model="any")
    expected = {even: float(2 * 8), clusters: corpus.worker_weight([0])}
    for data, weight in expected.items():
        config = RunConfig(workers=1, mode=mode, data=data, training=training)
        worker = Training(config, corpus, alone(), EventLog(tmp_path, 0), torch.device("cpu"), tmp_path, leader=True)
        assert worker.mode.averager.weight == weight
