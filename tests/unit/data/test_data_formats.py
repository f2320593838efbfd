"""Data as people have it: other encodings, JSON arrays, CSV, broken rows. Read properly, or refused by name."""

import bz2
import codecs
import gzip
import json
import logging
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.data.config import DataConfig
from diloco.data.preparation import builder
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.sources import decoding, formats
from diloco.data.sources.base import Document
from diloco.data.sources.registry import open_source
from diloco.errors import DataError

TEXT = "Käse für fünf Personen\n"


def documents(path: Path, start: int = 0, **options: str) -> list[Document]:
    return list(open_source(DataConfig(source=str(path), **options)).documents(start))  # type: ignore[arg-type]


def texts(path: Path, start: int = 0, **options: str) -> list[str]:
    return [document.text for document in documents(path, start, **options)]


def config(folder: Path, source: Path, **options: object) -> DataConfig:
    return DataConfig(source=str(source), vocab_size=300, shards=2, cache_dir=str(folder / "cache"), **options)  # type: ignore[arg-type]


# Encodings


def test_a_folder_in_another_encoding_is_named_with_file_offset_and_remedy_and_read_with_the_option(
    tmp_path: Path,
) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    for name in "ab":
        (source / f"{name}.txt").write_bytes(TEXT.encode("latin-1") * 2000)
    with pytest.raises(
        DataError, match=r"a\.txt is not UTF-8 text: byte 0xe4 at offset 1 .*--data\.encoding \(latin-1"
    ):
        prepare(config(tmp_path, source))
    assert texts(source, encoding="latin-1") == [TEXT * 2000] * 2
    with pytest.raises(
        DataError, match=r"nothing in .* can be read \(2 unreadable files\).*a\.txt is not UTF-8.*encoding"
    ):
        prepare(config(tmp_path, source, on_bad_row="skip"))


def test_a_mixture_of_encodings_is_counted_file_by_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    for i in range(20):
        (source / f"{i:02}.txt").write_bytes((f"{i} {TEXT}" * 50).encode("latin-1" if i % 5 == 0 else "utf-8"))
    with caplog.at_level(logging.WARNING):
        corpus = prepare(config(tmp_path, source, on_bad_row="skip"))
    assert corpus.meta.skipped == {"unreadable files": 4} and corpus.meta.documents == 16
    assert corpus.meta.event()["skipped"] == {"unreadable files": 4}, "in the run's record"
    assert "4 unreadable files" in caplog.text and "00.txt is not UTF-8" in caplog.text


def test_of_several_encodings_each_file_has_the_first_that_fits_all_of_it(tmp_path: Path) -> None:
    contents = {"a.txt": TEXT, "b.csv": f'text\n"{TEXT}"\n', "c.json": json.dumps([TEXT], ensure_ascii=False)}
    for name, content in contents.items():
        for encoding_name in ("utf-8", "latin-1"):
            folder = tmp_path / encoding_name
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(content.encode(encoding_name))
    assert texts(tmp_path, encoding="utf-8, latin-1") == [TEXT] * 6
    assert texts(tmp_path / "utf-8", encoding="latin-1") != [TEXT] * 3, "every byte is latin-1"
    with pytest.raises(DataError, match=r"a\.txt is not UTF-16-LE text"):
        texts(tmp_path / "latin-1", encoding="utf-8,utf-16-le")


MARKS = {
    "utf-8": codecs.BOM_UTF8, "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE, "utf-32-be": codecs.BOM_UTF32_BE,
}  # fmt: skip


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("option", [None, "latin-1"])
def test_a_byte_order_mark_says_what_a_file_is_in_every_format(tmp_path: Path, name: str, option: str | None) -> None:
    rows = [{"text": TEXT}, {"text": "two"}]
    contents = {
        "a.txt": TEXT,
        "b.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        "c.json": json.dumps(rows, ensure_ascii=False),
        "d.csv": f'id,text\r\n1,"{TEXT}"\r\n2,two\r\n',
    }
    options = {} if option is None else {"encoding": option}
    for file, content in contents.items():
        (tmp_path / file).write_bytes(MARKS[name] + content.encode(name))
        expected = [TEXT] if file == "a.txt" else [TEXT, "two"]
        assert texts(tmp_path / file, **options) == expected, file


def test_utf_16_without_a_mark_is_recognised_in_the_message_and_read_with_the_option(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(("plain " * 100).encode("utf-16-le"))
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text.*zero byte at offset 1.*--data\.encoding utf-16-le"):
        texts(path)
    assert texts(path, encoding="utf-16-le") == ["plain " * 100]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_rows_in_another_encoding_are_named_and_read_with_the_option(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "CHUNK_BYTES", 7)  # a character is cut in two by the chunks
    content = {"a.jsonl": '{"text": "é"}\n' * 3, "a.json": '[{"text": "é"}]', "a.csv": "text\né\n"}[name]
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=rf"{name}.* byte 0xe9 at .*--data\.encoding"):
        texts(path)
    assert set(texts(path, encoding="latin-1")) == {"é"}
    path.write_bytes(content.encode())
    assert set(texts(path)) == {"é"}
    if name != "a.jsonl":
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(DataError, match=rf"offset {content.encode('latin-1').index(0xE9)} "):
            texts(path)


def test_an_encoding_is_refused_where_there_are_no_files_to_decode(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    for source in ("stdlib", "hf:some/name", str(tmp_path)):
        with pytest.raises(DataError, match=r"data\.encoding"):
            open_source(DataConfig(source=source, encoding="latin-1"))


# JSON


ROWS: list[object] = [{"text": f'row {i} äß \\ " ] }}', "n": -1.5e3, "x": [None, True, {"a": []}]} for i in range(40)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_an_array_is_read_element_by_element_whatever_the_chunks(
    tmp_path: Path, indent: int | None, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "CHUNK_BYTES", chunk)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps([*ROWS, "a text"], indent=indent).encode()))
    expected = [*(row["text"] for row in ROWS), "a text"]  # type: ignore[index]
    for start in (0, 1, 39, 41):
        assert texts(path, start) == expected[start:]


def test_one_object_and_objects_one_after_another_are_rows_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS[0], indent=4))
    assert texts(path) == [ROWS[0]["text"]]  # type: ignore[index]
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert texts(path) == [row["text"] for row in ROWS]  # type: ignore[index]
    for nothing in ("", "[]", " [ ] \n"):
        path.write_text(nothing)
        assert texts(path) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"text": "a"}, {"text": "b"}', r"after row 2: the array has no end"),
        ('[{"text": "a"}, {"text": "b', r"after row 1: Unterminated string"),
        ('[{"text": "a"} {"text": "b"}]', r"after row 1: ',' or '\]' is missing"),
        ('[{"text": "a"}, {text: "b"}]', r"after row 1: .* at character 18"),
        ('[{"text": "a"}, {"text": ' + "9" * 5000 + "}]", r"after row 1: .*digits.* at character 17"),
        ('[{"text": "a"}] x', r"after row 1: there is more after the end"),
        ('[{"text": "a"}, 3]', r"row 2 is neither a text nor an object with fields, but 3"),
        ('{"data": [{"text": "a"}]}', r"row 1 has no field 'text'; its fields are: data\. .*jq -c '\.data\[\]'"),
        ('{"messages": []}', r"row 1 has no field 'text'.*--data\.format chat"),
    ],
)
def test_broken_json_is_named_by_file_row_and_place(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"a\.json.*" + reason):
        texts(path)


def test_a_row_that_never_ends_is_refused_before_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "LONGEST_ROW", 1 << 10)
    monkeypatch.setattr(decoding, "CHUNK_BYTES", 1 << 8)
    path = tmp_path / "a.json"
    path.write_text('[{"text": "' + "a" * 10_000)
    with pytest.raises(DataError, match=r"a row is longer than"):
        texts(path)


# CSV


def test_csv_with_quoted_line_ends_and_delimiters_is_read_by_column_names(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text,kind\r\n1,"two\nlines, and ""quotes""",x\r\n\r\n2,plain,y\r\n', newline="")
    assert documents(path, label_field="kind") == [
        Document('two\nlines, and "quotes"', "x"),
        Document("plain", "y"),
    ]
    assert texts(path, 1) == ["plain"]
    assert texts(path, text_field="kind") == ["x", "y"]
    (tmp_path / "b.tsv").write_text('text\tid\na "b" c\t1\n')
    (tmp_path / "c.csv").write_text('id;text\n1;"half; whole"\n')
    assert texts(tmp_path / "c.csv") == ["half; whole"], "the delimiter with which the header has the column"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("id,body\n1,a\n", r"a\.csv has no field 'text'; its fields are: id, body\. .*--data\.text_field"),
        ("id,text\n1,a\n2,b,c\n", r"a\.csv, row 2 \(to line 3\) has 3 fields, but the header has 2"),
        ('id,text\n1,"a\n2,b\n', r"row 1 .*a quotation mark has no end, so the following rows are lost"),
        ('id,text\n1,"a"b\n', r"row 1 \(to line 2\) is not a row of CSV"),
        ("text,text\n1,2\n", r"two columns of the same name"),
        ("id,text\r1,a\r", r"a\.csv has a first line that is not one of CSV .*repair its line ends"),
    ],
)
def test_broken_csv_is_named_by_file_row_and_line(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=reason):
        texts(path)
    assert [document.problem is None for document in documents(path, on_bad_row="skip")].count(False) == 1


# Broken rows


def test_broken_rows_are_left_out_counted_and_told_where_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": f"document {i} " * 30}) for i in range(40)]
    path.write_text("\n".join([*good[:20], '{"text": "cut', '{"body": "x"}', '{"text": null}', *good[20:]]))
    with pytest.raises(DataError, match=r"line 21 is not a line of JSON.*--data\.on_bad_row skip"):
        prepare(config(tmp_path, path))
    with caplog.at_level(logging.WARNING):
        corpus = prepare(config(tmp_path, path, on_bad_row="skip"))
    assert corpus.meta.documents == 40 and corpus.meta.skipped == {"unreadable rows": 3}
    assert "3 unreadable rows" in caplog.text and "line 21" in caplog.text
    with pytest.raises(DataError, match="line 21"):  # the cached corpus of the other rule is another one
        prepare(config(tmp_path, path))


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_a_text_gives_the_same_tokenizer_and_passages_however_it_is_packed(
    tmp_path: Path, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample of the tokenizer is a share of the text, and the longest passage too."""
    monkeypatch.setattr(builder, "TOKENIZER_SAMPLE_BYTES", 20_000)
    rows = [{"text": f"{number} {'word ' * (number % 50)}{number * number}"} for number in range(2000)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    suffix = {gzip.compress: ".gz", lzma.compress: ".xz", bz2.compress: ".bz2"}[pack]
    made = []
    for name, data in (("a.jsonl", content), (f"a.jsonl{suffix}", pack(content))):
        (tmp_path / name).write_bytes(data)
        asked = config(tmp_path, tmp_path / name)
        source = open_source(asked)
        assert source.size_bytes == len(content)
        made.append(builder.train_tokenizer(asked, source).to_json())
    assert made[0] == made[1]
