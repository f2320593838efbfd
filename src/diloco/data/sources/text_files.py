"""Plain text: a file is a document."""

from collections.abc import Iterator
from typing import final

from diloco.data.sources.base import Document
from diloco.data.sources.compression import open_decompressed
from diloco.data.sources.document_file import DocumentFile
from diloco.data.sources.encoding import NotText, decode


@final
class TextFile(DocumentFile):
    has_fields = False

    def documents(self, start: int) -> Iterator[Document]:
        if start > 0:
            self.count = 1
            return
        with open_decompressed(self.path) as (stream, raw):
            content = stream.read()
            self.position = raw.tell()
        try:
            text = decode(content, self.encoding)
        except NotText as error:
            yield from self._bad_file(str(error), start)
            return
        self.count = 1
        yield Document(text)
