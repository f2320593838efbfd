"""A corpus that comes from elsewhere: every byte is checked, and nothing is left half written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.data.config import DataConfig
from diloco.data.corpus import META, TOKENIZER, VALIDATION, Corpus, shard_name
from diloco.data.preparation.received_corpus import (
    METADATA_FILES,
    bytes_to_receive,
    corpus_files,
    find_corpus,
    receive_files,
    receive_metadata,
    received_corpus_folder,
)
from diloco.errors import DataError
from support.saved_runs import small_corpus


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return small_corpus(tmp_path_factory.mktemp("there"))[1]


def from_(corpus: Corpus, fetched: list[str] | None = None) -> Callable[..., None]:
    def fetch(name: str, path: Path, most_bytes: int = 0, digest: str = "") -> None:
        if fetched is not None:
            fetched.append(name)
        shutil.copyfile(corpus_files(corpus)[name], path)

    return fetch


def silent(stage: str, done: int, total: int | None) -> None:
    del stage, done, total


def test_a_share_is_received_and_opened_and_the_rest_can_come_later(served: Corpus, tmp_path: Path) -> None:
    data, fetched = DataConfig(cache_dir=str(tmp_path)), list[str]()
    assert find_corpus(data, served.digest) is None
    folder = received_corpus_folder(data, served.digest)
    meta = receive_metadata(folder, served.digest, from_(served, fetched))
    assert bytes_to_receive(folder, meta, [1, 4]) == sum(
        served.file_sizes()[name] for name in (VALIDATION, shard_name(1), shard_name(4))
    )
    corpus = receive_files(folder, meta, [1, 4], from_(served, fetched), silent)
    assert fetched == [*METADATA_FILES, VALIDATION, shard_name(1), shard_name(4)]
    assert [shard for shard in range(corpus.shards) if corpus.has(shard)] == [1, 4]
    assert (corpus.shard(4) == served.shard(4)).all() and (corpus.validation() == served.validation()).all()
    again = find_corpus(data, served.digest)
    assert again == corpus
    receive_files(folder, meta, [1, 4], from_(served, fetched), silent)
    assert len(fetched) == len(METADATA_FILES) + 3  # what is here does not come again


def test_files_are_asked_for_with_their_size_and_digest(served: Corpus, tmp_path: Path) -> None:
    requests = []

    def fetch(name: str, path: Path, most_bytes: int, digest: str) -> None:
        requests.append((name, most_bytes, digest))
        from_(served)(name, path)

    meta = receive_metadata(tmp_path, served.digest, from_(served))
    receive_files(tmp_path, meta, [1], fetch, silent)
    assert requests == [
        (name, corpus_files(served)[name].stat().st_size, meta.files[name]) for name in (VALIDATION, shard_name(1))
    ]


def test_a_corpus_prepared_here_is_not_received(served: Corpus) -> None:
    assert find_corpus(DataConfig(cache_dir=str(served.folder.parent)), served.digest) == served


@pytest.mark.parametrize("name", [META, TOKENIZER, "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b'{"eos_token": "hello", "auto_map": {}}'])
def test_a_description_that_does_not_have_the_digest_is_refused_and_removed(
    served: Corpus, tmp_path: Path, name: str, content: bytes
) -> None:
    def fetch(requested: str, path: Path) -> None:
        from_(served)(requested, path)
        if requested == name:
            path.write_bytes(content)

    with pytest.raises(DataError, match="does not match the corpus"):
        receive_metadata(tmp_path / "corpus", served.digest, fetch)
    assert not list((tmp_path / "corpus").iterdir())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", "00" * 32),
        ("files", {"../../evil": "00" * 32}),
        ("shard_tokens", [10**15] * 6),
        ("vocab_size", 10**9),
        ("end_of_text", -1),
        ("shard_tokens", ["many"] * 6),
    ],
)
def test_a_meta_json_that_makes_no_sense_is_refused(served: Corpus, tmp_path: Path, field: str, value: object) -> None:
    def fetch(requested: str, path: Path) -> None:
        from_(served)(requested, path)
        if requested == META:
            path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    with pytest.raises(DataError, match="does not match the corpus"):
        receive_metadata(tmp_path, served.digest, fetch)


def test_a_shard_that_is_not_the_corpuss_own_is_refused_and_removed(served: Corpus, tmp_path: Path) -> None:
    def fetch(requested: str, path: Path, most_bytes: int = 0, digest: str = "") -> None:
        from_(served)(requested, path)
        if requested == shard_name(2):
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data)

    meta = receive_metadata(tmp_path, served.digest, fetch)
    with pytest.raises(DataError, match="does not match the corpus"):
        receive_files(tmp_path, meta, [0, 2], fetch, silent)
    assert (tmp_path / shard_name(0)).exists() and not (tmp_path / shard_name(2)).exists()


def test_metadata_that_another_version_received_is_fetched_again_and_the_shards_are_kept(
    served: Corpus, tmp_path: Path
) -> None:
    data, fetched = DataConfig(cache_dir=str(tmp_path)), list[str]()
    folder = received_corpus_folder(data, served.digest)
    meta = receive_metadata(folder, served.digest, from_(served))
    receive_files(folder, meta, [1], from_(served), silent)
    (folder / META).write_text(json.dumps(json.loads((folder / META).read_text()) | {"version": 3}))
    assert find_corpus(data, served.digest) is None
    meta = receive_metadata(folder, served.digest, from_(served, fetched))
    assert receive_files(folder, meta, [1], from_(served, fetched), silent).has(1)
    assert fetched == [META]
