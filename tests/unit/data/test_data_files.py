"""Files of documents: every format gives the same documents, from any of them on; broken ones are named."""

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from diloco.data.config import DataConfig
from diloco.data.sources.base import Document
from diloco.data.sources.decoding import COMPRESSIONS
from diloco.data.sources.registry import open_source
from diloco.errors import DataError

ROWS = [{"text": f"document {i}\nwith ünïcödé and a line", "kind": f"k{i % 3}", "n": i} for i in range(50)]


def as_lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd_frames(content: bytes) -> bytes:
    """Several frames, as `cat a.zst b.zst` and pzstd make them."""
    middle = len(content) // 2
    return b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (content[:middle], content[middle:]))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstd_frames,
}


def write_parquet(path: Path, rows: list[dict[str, object]], row_group_size: int = 7) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        return write_parquet(path, rows)
    suffix = path.suffix if path.suffix in COMPRESS else ""
    kind = Path(path.stem).suffix if suffix else path.suffix
    content = {".json": as_array, ".csv": as_table, ".tsv": as_table}.get(kind, as_lines)(rows)
    path.write_bytes(COMPRESS[suffix](content.replace(b";", b"\t") if kind == ".tsv" else content))
    return path


def as_array(rows: list[dict[str, object]]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def as_table(rows: list[dict[str, object]]) -> bytes:
    """With semicolons, and without commas in the header: the delimiter is found."""
    content = io.StringIO(newline="")
    writer = csv.DictWriter(content, ["kind", "text", "n"], delimiter=";")
    writer.writeheader()
    writer.writerows(rows)
    return content.getvalue().encode()


def documents(path: Path, start: int = 0, **options: str) -> list[Document]:
    return list(open_source(DataConfig(source=str(path), **options)).documents(start))  # type: ignore[arg-type]


STREAMED = ["a.json", "a.json.zst", "a.csv", "a.csv.gz", "a.tsv", "a.tsv.xz"]
FORMATS = ["a.parquet", *(f"a.jsonl{suffix}" for suffix in COMPRESS), *STREAMED]


def test_every_compression_is_tested() -> None:
    assert COMPRESS.keys() - {""} == COMPRESSIONS.keys()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("start", [0, 1, 6, 7, 30, 49, 50, 60])
def test_rows_come_in_order_from_any_of_them_on(tmp_path: Path, name: str, start: int) -> None:
    path = write(tmp_path, name, ROWS)
    assert [document.text for document in documents(path, start)] == [row["text"] for row in ROWS[start:]]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix]("ä line\r\nand another\n".encode() * 1000))
    assert documents(path) == [Document("ä line\r\nand another\n" * 1000)]


def test_a_folder_mixes_formats_in_the_order_of_names_and_labels_by_file(tmp_path: Path) -> None:
    write(tmp_path, "b.jsonl.gz", ROWS[:2])
    write(tmp_path, "a.parquet", ROWS[2:5])
    (tmp_path / "c.txt").write_text("plain")
    (tmp_path / "d.jsonl.tar").write_bytes(b"unknown")
    source = open_source(DataConfig(source=str(tmp_path)))
    expected = [("a", 2), ("a", 3), ("a", 4), ("b", 0), ("b", 1)]
    whole = [*(Document(str(ROWS[i]["text"]), label) for label, i in expected), Document("plain", "c")]
    for start in range(8):
        assert list(source.documents(start)) == whole[start:]
        assert source.skipped == {"not a known suffix": 1}
    done, total = source.progress()
    assert done == total


def test_text_and_label_fields_are_chosen_by_name(tmp_path: Path) -> None:
    for name in FORMATS:
        path = write(tmp_path, name, ROWS)
        assert documents(path, 48, text_field="kind", label_field="n") == [Document("k0", "48"), Document("k1", "49")]


def test_identity_knows_the_fields(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", ROWS)
    configs = [DataConfig(source=str(path)), DataConfig(source=str(path), text_field="kind")]
    assert len({json.dumps(open_source(config).identity()) for config in configs}) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{'text': 1}", r"line 3 is not a line of JSON"),
        (b'{"text": "cut', r"line 3 is not a line of JSON"),
        (b'{"text": "\xff"}', r"line 3 is not a line of JSON"),
        (b'["text"]', r"line 3 is neither a text nor an object with fields"),
        (b'{"body": "x", "n": 1}', r"line 3 has no field 'text'; its fields are: body, n\. .*--data\.text_field"),
        (b'{"text": null}', r"line 3: field 'text' is None, not a text"),
        (b'{"text": "\\ud800"}', r"line 3: field 'text' is not Unicode text"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(ROWS[:1]) + b"\n" + line + b"\n" + as_lines(ROWS[1:]))  # the blank line counts as a line
    with pytest.raises(DataError, match=r"a\.jsonl, " + reason):
        documents(path)


def test_broken_parquet_rows_columns_and_files_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [*ROWS[:8], {"text": None, "kind": "", "n": 0}])
    with pytest.raises(DataError, match=r"a\.parquet, row 9: field 'text' is None"):
        documents(path)
    with pytest.raises(DataError, match=r"a\.parquet has no field 'body'; its fields are: text, kind, n"):
        documents(path, text_field="body")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        documents(path)


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_compressed_file_is_an_error_and_never_a_shorter_one(
    tmp_path: Path, suffix: str, damage: str
) -> None:
    path = tmp_path / f"a.txt{suffix}"
    content = COMPRESS[suffix](b"".join(f"line {i}\n".encode() for i in range(5000)))
    if damage == "changed" and suffix == ".zst":
        content = b"not zstd" + content
    middle = len(content) // 2
    path.write_bytes(content[:-9] if damage == "cut" else content[:middle] + b"\0\xff\0\xff" + content[middle + 4 :])
    with pytest.raises(DataError, match=r"a\.txt.* is damaged or cut short: .*; fetch it again"):
        documents(path)


def test_fields_are_refused_where_no_document_has_any(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(DataError, match=r"plain text only.*data\.label_field"):
        documents(tmp_path, label_field="kind")
    with pytest.raises(DataError, match=r"'stdlib' has no fields"):
        open_source(DataConfig(text_field="body"))
    write(tmp_path, "b.jsonl", ROWS)
    with pytest.raises(DataError, match=r"a\.txt is plain text, which has no field 'kind'"):
        documents(tmp_path, label_field="kind")


def test_missing_libraries_are_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path, "a.parquet", ROWS), write(tmp_path, "a.jsonl.zst", ROWS)]
    for module, path in zip(["pyarrow.parquet", "pyarrow"], paths, strict=True):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(DataError, match=r"pip install -c constraints\.txt -e '\.\[data\]'"):
            documents(path)
