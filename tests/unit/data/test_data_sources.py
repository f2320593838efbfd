"""Sources: the same documents in the same order everywhere; what cannot be used is named or counted."""

import os
from pathlib import Path

import pytest

from diloco.data.config import DataConfig
from diloco.data.sources.base import Source
from diloco.data.sources.local import LocalFiles, StandardLibrary
from diloco.data.sources.registry import open_source
from diloco.errors import ConfigError, DataError


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def open_named(name: str) -> Source:
    return open_source(DataConfig(source=name))


def texts(source: Source, start: int = 0) -> list[str]:
    return [document.text for document in source.documents(start)]


def test_stdlib_source_is_this_interpreters_library() -> None:
    source = open_named("stdlib")
    assert isinstance(source, StandardLibrary)
    assert source.root == Path(os.__file__).parent
    assert source.size_bytes is not None
    assert 3_000_000 < source.size_bytes < 40_000_000


def test_stdlib_leaves_out_packages_tests_tables_and_undecodable_files(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "b.py": "b = 1\n",
            "a.py": "a = 1\n",
            "email/header.py": "h = 1\n",
            "data.txt": "no source",
            "broken.py": b"# \xff\xfe",
            **{f"{folder}/x.py": "no" for folder in ["site-packages", "test", "json/tests", "encodings", ".git"]},
        },
    )
    source = StandardLibrary(root)
    assert texts(source) == ["a = 1\n", "b = 1\n", "h = 1\n"]
    assert source.skipped == {"not UTF-8 text": 1}


def test_stdlib_topics_come_as_prose_not_as_source(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"pydoc_data/topics.py": "# generated\ntopics = {'b': 'Two\\nlines' ' here', 'a': r'''One'''}\n"},
    )
    assert texts(StandardLibrary(tmp_path)) == ["One", "Two\nlines here"]


def test_the_real_topics_of_this_interpreter_are_read_as_prose(tmp_path: Path) -> None:
    topics = Path(os.__file__).parent / "pydoc_data" / "topics.py"
    write(tmp_path, {"pydoc_data/topics.py": topics.read_bytes()})
    documents = texts(StandardLibrary(tmp_path))
    assert len(documents) > 50
    assert any('The "assert" statement' in document for document in documents)


def test_stdlib_without_sources_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no Python source under.*--data\.source"):
        StandardLibrary(tmp_path)


def test_folder_is_read_recursively_in_sorted_order_and_other_files_are_counted(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "z.txt": "z",
            "a/m.md": "m",
            "README": "r",
            "P.PY": "p",
            "i.png": b"\x89",
            "bad.txt": b"\xff",
            "nul.rst": b"a\0",
        }
        | {".hidden.txt": "no", ".git/x.txt": "no"},
    )
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    source = open_source(DataConfig(source=str(tmp_path), on_bad_row="skip"))
    for _ in range(2):  # a second walk gives and counts the same
        documents = list(source.documents())
        assert [document.text for document in documents if document.problem is None] == ["p", "r", "m", "z"]
        assert [Path(str(document.problem).split()[0]).name for document in documents if document.problem] == [
            "bad.txt",
            "nul.rst",
        ]
        assert source.skipped == {"not a known suffix": 1}


def test_line_ends_are_kept_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfone\r\ntwo\n"})
    assert texts(open_named(str(tmp_path / "a.txt"))) == ["one\r\ntwo\n"]


def test_identity_changes_with_content_size_time_and_names(tmp_path: Path) -> None:
    def identity() -> str:
        return str(open_named(str(tmp_path)).identity())

    write(tmp_path, {"a.txt": "one"})
    os.utime(tmp_path / "a.txt", ns=(0, 0))
    identities = [identity()]
    assert identity() == identities[0]
    os.utime(tmp_path / "a.txt", ns=(0, 1))
    identities.append(identity())
    write(tmp_path, {"a.txt": "other"})
    os.utime(tmp_path / "a.txt", ns=(0, 1))
    identities.append(identity())
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    identities.append(identity())
    assert len(set(identities)) == 4


def test_missing_path_is_refused_by_name_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*no such file or folder.*'stdlib'"):
        open_named(str(tmp_path / "nowhere"))


def test_a_device_is_not_a_text_file() -> None:
    with pytest.raises(DataError, match="/dev/zero"):
        open_named("/dev/zero")


def test_empty_folder_and_folder_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder is empty"):
        open_named(str(tmp_path))
    write(tmp_path, {"x.png": b"1", "y.bin": b"2"})
    with pytest.raises(DataError, match=r"none of the 2 files.*\.txt"):
        open_named(str(tmp_path))


def test_single_file_of_unknown_suffix_or_encoding_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"x.png": b"PNG", "latin.txt": b"caf\xe9"})
    with pytest.raises(DataError, match=r"x\.png.*'\.png' is not the suffix of a file that can be read"):
        open_named(str(tmp_path / "x.png"))
    with pytest.raises(DataError, match=r"latin\.txt.*is not UTF-8 text"):
        texts(open_named(str(tmp_path / "latin.txt")))


def test_unreadable_file_is_refused_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulated, because these tests may run as root, which no file mode stops.
    write(tmp_path, {"a.txt": "a", "b.txt": "b"})
    source = LocalFiles(tmp_path)
    real = Path.open

    def open_file(path: Path, *arguments: str) -> object:
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", open_file)
    with pytest.raises(DataError, match=r"cannot read .*b\.txt: Permission denied"):
        list(source.documents())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", ""),
        ("source", "  "),
        ("text_field", ""),
        ("label_field", " "),
        ("max_documents", 0),
        ("max_bytes", 1.5),
        ("partition", "random"),
        ("format", "xml"),
        ("on_bad_row", "repair"),
        ("encoding", "latin-99"),
        ("encoding", "rot13"),
        ("feature_model", ""),
        ("tokenizer", ""),
        ("cache_dir", ""),
        ("vocab_size", 256),
        ("vocab_size", 2**20 + 1),
        ("vocab_size", 2048.0),
        ("vocab_size", "2048"),
        ("sequence_length", 0),
        ("sequence_length", True),
        ("shards", 0),
        ("shards", 2**16 + 1),
        ("validation_fraction", 0.0),
        ("validation_fraction", 1.0),
        ("validation_fraction", float("nan")),
        ("validation_fraction", "0.1"),
    ],
)
def test_config_refuses_a_bad_value_and_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        DataConfig(**{field: value})  # type: ignore[arg-type]
    assert f"data.{field} is {value!r}" in str(refusal.value)


def test_config_refuses_a_vocab_size_beside_a_tokenizer() -> None:
    DataConfig(tokenizer="t.json")
    with pytest.raises(ConfigError, match=r"data\.vocab_size is 300.*t\.json"):
        DataConfig(tokenizer="t.json", vocab_size=300)


def test_config_refuses_clusters_without_a_model_and_a_model_without_clusters() -> None:
    DataConfig(partition="clusters", feature_model="m")
    with pytest.raises(ConfigError, match=r"--data\.feature_model"):
        DataConfig(partition="clusters")
    with pytest.raises(ConfigError, match=r"--data\.partition clusters"):
        DataConfig(feature_model="m")
