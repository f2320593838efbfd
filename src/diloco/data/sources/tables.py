"""Tables with named columns: CSV, TSV and Parquet. A row is a document.

The first line of a CSV file has the names of the columns. A field in quotation marks may hold line ends and delimiters.
Parquet needs pyarrow (the extra `data`).
"""

import csv
from collections.abc import Iterator
from typing import Any, ClassVar, final

from diloco.data.sources.base import Document
from diloco.data.sources.compression import open_decompressed
from diloco.data.sources.document_file import DocumentFile
from diloco.data.sources.encoding import NotText, TextReader
from diloco.errors import DataError, install_hint

LONGEST_FIELD = 1 << 26
"""Characters of a field of a CSV file; longer ones have lost a quotation mark."""


class Csv(DocumentFile):
    """Fields apart by commas, or by semicolons or tabs if only then the header has the columns asked for."""

    DELIMITERS: ClassVar[str] = ",;\t"

    def documents(self, start: int) -> Iterator[Document]:
        csv.field_size_limit(LONGEST_FIELD)
        with open_decompressed(self.path) as (stream, raw):
            lines = TextReader(stream, self.encoding).lines()
            try:
                header = next(lines, "")
                if not header:
                    return
                try:
                    delimiter, columns = self._columns(header)
                except DataError as error:
                    yield from self._bad_file(str(error), start)
                    return
                reader = csv.reader(lines, delimiter=delimiter, strict=True)
                while (row := self._next(reader)) is not None:
                    if row == []:
                        continue  # an empty line
                    self.count += 1
                    self.position = raw.tell()
                    if self.count > start:
                        yield self._document(
                            columns, row, f"{self.path}, row {self.count} (to line {reader.line_num + 1})"
                        )
            except NotText as error:
                yield from self._bad_file(str(error), start)

    def _columns(self, header: str) -> tuple[str, list[str]]:
        """The delimiter and the names of the columns."""
        problem: DataError | None = None
        for delimiter in self.DELIMITERS:
            try:
                columns = next(csv.reader([header], delimiter=delimiter))
            except csv.Error as error:  # line ends of old Macs: the whole file is one line
                raise DataError(f"has a first line that is not one of CSV ({error}); repair its line ends") from error
            try:
                self.rows.check_columns(columns)
            except DataError as error:
                problem = problem or error
            else:
                if len(set(columns)) < len(columns):
                    raise DataError(f"has two columns of the same name: {', '.join(columns)}; rename one")
                return delimiter, columns
        assert problem is not None
        raise problem

    @staticmethod
    def _next(reader: Any) -> list[str] | str | None:
        """The fields of the next row; a text that says what is wrong with it; None at the end."""
        try:
            row: list[str] = next(reader)
        except StopIteration:
            return None
        except csv.Error as error:
            return str(error)
        return row

    def _document(self, columns: list[str], row: list[str] | str, where: str) -> Document:
        if isinstance(row, str):
            # A field that goes on to the end of the file, or of what is allowed, has swallowed other rows.
            lost = "unexpected end" in row or "field larger" in row
            reason = "a quotation mark has no end, so the following rows are lost" if lost else row
            return self.rows.bad(f"{where} is not a row of CSV ({reason}); repair or remove it", is_file=lost)
        if len(row) != len(columns):
            return self.rows.bad(
                f"{where} has {len(row)} fields, but the header has {len(columns)}; put quotation marks around fields "
                "with delimiters or line ends, or remove the row"
            )
        return self.rows.document(dict(zip(columns, row, strict=True)), where)


@final
class Tsv(Csv):
    DELIMITERS = "\t"


@final
class Parquet(DocumentFile):
    BATCH_ROWS = 1024

    def documents(self, start: int) -> Iterator[Document]:
        parquet = _import_parquet()
        size = self.path.stat().st_size
        try:
            with parquet.ParquetFile(self.path) as file:
                try:
                    self.rows.check_columns(file.schema_arrow.names)
                except DataError as error:
                    yield from self._bad_file(str(error), start)
                    return
                for row in self._rows(file, start):
                    self.position = size * self.count // file.metadata.num_rows
                    yield self.rows.document(row, f"{self.path}, row {self.count}")
        except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.path} cannot be read as Parquet: {error}; repair or remove it") from error

    def _rows(self, file: Any, start: int) -> Iterator[object]:
        names = self.rows.names
        columns = None if names is None else [name for name in names if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if self.count + rows <= start:  # skipped without reading
                self.count += rows
                continue
            for batch in file.iter_batches(self.BATCH_ROWS, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    self.count += 1
                    if self.count > start:
                        yield row


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"Parquet files need pyarrow, which is not installed: {install_hint('data')}") from error
    return pyarrow.parquet
