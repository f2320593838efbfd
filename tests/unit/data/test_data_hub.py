"""Hugging Face datasets: a folder in the hub's format is streamed; every problem of the hub is one quick sentence."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from huggingface_hub import errors as hub_errors

from diloco.data.config import DataConfig
from diloco.data.preparation import builder
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.sources import hub
from diloco.data.sources.base import Document
from diloco.data.sources.hub import HuggingFaceDataset, hub_error, parse
from diloco.data.sources.registry import open_source
from diloco.errors import DataError, SourceUnavailable

CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*.jsonl
  - split: validation
    path: en/validation.jsonl
- config_name: de
  data_files:
  - split: train
    path: de/*.jsonl
---
"""


def rows(config: str, split: str, count: int) -> list[dict[str, str]]:
    return [{"text": f"{config} {split} {i} " + "word " * (i % 9), "topic": f"t{i % 2}"} for i in range(count)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a repository of datasets holds: two configurations, two splits, and files in several parts."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    root = tmp_path / "repository"
    files = {"en/train-0": rows("en", "train", 40), "en/train-1": rows("en", "more", 30),
             "en/validation": rows("en", "validation", 5), "de/all": rows("de", "train", 3)}  # fmt: skip
    for name, content in files.items():
        path = root / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    (root / "README.md").write_text(CARD)
    return root


def documents(source: str, start: int = 0, **options: str) -> list[Document]:
    return list(open_source(DataConfig(source=source, **options)).documents(start))  # type: ignore[arg-type]


def test_a_folder_is_streamed_by_configuration_and_split_from_any_row_on(folder: Path) -> None:
    expected = [Document(row["text"]) for row in [*rows("en", "train", 40), *rows("en", "more", 30)]]
    for start in (0, 1, 39, 40, 69, 70):
        assert documents(f"hf:{folder}:en", start) == expected[start:]
    assert documents(f"hf:{folder}:de@train") == [Document(row["text"]) for row in rows("de", "train", 3)]
    labelled = documents(f"hf:{folder}:en@validation", 3, label_field="topic")
    assert labelled == [Document(row["text"], row["topic"]) for row in rows("en", "validation", 5)[3:]]


def test_conversations_and_bad_rows_are_read_as_from_files(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]}
             for i in range(3)]  # fmt: skip
    chats[1]["messages"].pop()
    datasets.Dataset.from_list(chats).save_to_disk(tmp_path / "saved")
    options = {"format": "chat", "chat_template": "chatml"}
    with pytest.raises(DataError, match=r"row 2 has no message of the assistant"):
        documents(f"hf:{tmp_path / 'saved'}", **options)
    first, bad, last = documents(f"hf:{tmp_path / 'saved'}", **options, on_bad_row="skip")
    assert bad.problem is not None and "row 2" in bad.problem
    assert last.answers is not None
    ((begin, end),) = last.answers
    assert last.text[begin:end] == "2!<|im_end|>\n" and first.text.startswith("<|im_start|>user\n0?<|im_end|>")


@pytest.mark.parametrize("splits", ["one", "several"])
def test_what_save_to_disk_wrote_is_read(tmp_path: Path, splits: str) -> None:
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(rows("x", "train", 20))
    saved = dataset if splits == "one" else datasets.DatasetDict(train=dataset, test=dataset.select(range(3)))
    saved.save_to_disk(str(tmp_path / "saved"))
    assert [d.text for d in documents(f"hf:{tmp_path / 'saved'}", 15)] == [
        r["text"] for r in rows("x", "train", 20)[15:]
    ]
    if splits == "one":
        with pytest.raises(DataError, match="saved as a single split"):
            documents(f"hf:{tmp_path / 'saved'}@test")
    else:
        assert len(documents(f"hf:{tmp_path / 'saved'}@test")) == 3
        with pytest.raises(DataError, match="no split 'dev'; it has: train, test"):
            documents(f"hf:{tmp_path / 'saved'}@dev")
    with pytest.raises(DataError, match="no configurations"):
        documents(f"hf:{tmp_path / 'saved'}:en")


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [
        ("", r"Config name is missing.*'en', 'de'.*hf:NAME:CONFIG@SPLIT"),
        (":fr", r"'fr' not found.*'en', 'de'"),
        (":en@test", r"(?i)split.*test.*validation"),
    ],
)
def test_missing_configurations_and_splits_are_named_with_those_there_are(
    folder: Path, suffix: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        documents(f"hf:{folder}{suffix}")


def test_a_missing_field_is_named_with_those_there_are(folder: Path) -> None:
    with pytest.raises(DataError, match=r"has no field 'body'; its fields are: text, topic\. .*--data\.text_field"):
        documents(f"hf:{folder}:en", text_field="body")
    with pytest.raises(DataError, match=r"has no field 'kind'.*--data\.label_field"):
        documents(f"hf:{folder}:en", label_field="kind")


def test_a_stream_of_unknown_size_is_prepared_and_bounded(folder: Path, tmp_path: Path) -> None:
    config = DataConfig(source=f"hf:{folder}:en", vocab_size=300, shards=2, cache_dir=str(tmp_path / "prepared"))
    reports: list[tuple[str, int, int | None]] = []
    whole = prepare(config, lambda *report: reports.append(report))
    assert whole.meta.documents == 70
    assert ("tokenising", 70, None) in reports
    bounded = prepare(replace(config, max_documents=50), lambda *report: reports.append(report))
    assert bounded.meta.documents == 50
    assert ("tokenising", 50, 50) in reports


def test_the_tokenizer_of_a_stream_learns_from_its_beginning_and_does_not_read_to_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "TOKENIZER_SAMPLE_BYTES", 300)
    given = 0
    real = HuggingFaceDataset.documents

    def counted(self: HuggingFaceDataset, start: int = 0) -> Iterator[Document]:
        nonlocal given
        for document in real(self, start):
            given += 1
            yield document

    monkeypatch.setattr(HuggingFaceDataset, "documents", counted)
    config = DataConfig(source=f"hf:{folder}:en", vocab_size=260)
    assert builder.train_tokenizer(config, open_source(config)).vocab_size == 260
    assert 5 < given < 30


def test_identity_of_a_hub_dataset_needs_no_network_and_tells_apart_what_differs(folder: Path) -> None:
    names = ["hf:allenai/c4", "hf:allenai/c4:en", "hf:allenai/c4:en@validation", f"hf:{folder}:en", f"hf:{folder}:de"]
    identities = [json.dumps(open_source(DataConfig(source=name)).identity()) for name in names]
    assert len(set(identities)) == len(names)
    (folder / "de" / "all.jsonl").write_text("{}")
    assert json.dumps(open_source(DataConfig(source=names[-1])).identity()) != identities[-1]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:allenai/c4", ("allenai/c4", None, None)),
        ("hf:allenai/c4:en", ("allenai/c4", "en", None)),
        ("hf:allenai/c4:en@validation", ("allenai/c4", "en", "validation")),
        ("hf:imdb@test", ("imdb", None, "test")),
        ("hf:", None),
        ("hf:a/b@", None),
        ("hf:a/b:", None),
        ("hf:/no/such/folder", None),
    ],
)
def test_names_are_taken_apart(spec: str, expected: tuple[str, str | None, str | None] | None) -> None:
    if expected is None:
        with pytest.raises(DataError, match=r"hf:NAME|no folder"):
            parse(spec)
    else:
        assert parse(spec) == expected


def test_a_path_with_colons_in_it_is_a_path(tmp_path: Path) -> None:
    odd = tmp_path / "a:b@c"
    odd.mkdir()
    assert parse(f"hf:{odd}") == (str(odd), None, None)


class FakeHub:
    """Answers as the hub does, or does not."""

    def __init__(self, error: Exception) -> None:
        self.error, self.questions = error, 0

    def dataset_info(self, name: str, timeout: float) -> None:
        assert name == "allenai/c4" and timeout <= 30
        self.questions += 1
        raise self.error


class TransportError(Exception):
    """httpx has an error of this name above all its connection errors."""


def answer(kind: type[hub_errors.HfHubHTTPError]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("401 Client Error",)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "remedy"),
    [
        (TransportError("Name or service not known"), SourceUnavailable, "cannot be reached.*check the network"),
        (ConnectionError("refused"), SourceUnavailable, "cannot be reached.*check the network"),
        (TimeoutError("too slow"), SourceUnavailable, "cannot be reached"),
        (hub_errors.OfflineModeIsEnabled("off"), SourceUnavailable, "HF_HUB_OFFLINE"),
        (answer(hub_errors.GatedRepoError), DataError, "is gated.*hf auth login"),
        (answer(hub_errors.RepositoryNotFoundError), DataError, "no such name on the hub"),
        (hub_errors.HFValidationError("bad name"), DataError, "no such name on the hub"),
        (RuntimeError("what else"), DataError, "cannot be read: what else"),
    ],
)
def test_every_problem_of_the_hub_is_one_sentence_after_one_question(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[DataError], remedy: str
) -> None:
    fake = FakeHub(error)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: fake)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it retries for half a minute"))
    with pytest.raises(DataError, match=rf"hf:allenai/c4:en.*{remedy}") as refusal:
        documents("hf:allenai/c4:en")
    assert type(refusal.value) is kind
    assert fake.questions == 1


def test_the_revision_is_pinned_while_a_hub_dataset_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Info:
        sha = "0123abcd"

    class Api:
        def dataset_info(self, *_: object, **__: object) -> Info:
            return Info()

    requests: list[object] = []
    real = datasets.load_dataset

    def load(name: str, config: str, *, revision: str | None, **options: object) -> object:
        requests.append((name, config, revision))
        return real(str(folder), config, **options)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source(DataConfig(source="hf:owner/name:de"))
    assert len(list(source.documents())) == 3
    assert source.fingerprint() == "0123abcd"
    assert requests == [("owner/name", "de", "0123abcd")]


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install -c constraints\.txt -e '\.\[hf\]'"):
        documents("hf:allenai/c4:en")


def test_an_error_that_is_ours_already_stays_as_it_is() -> None:
    error = DataError("ours")
    assert hub_error("x", error) is error
    assert hub.PREFIX == "hf:"
