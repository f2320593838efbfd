"""The file formats, by suffix. A format that is read as a stream may be compressed: .gz, .xz, .bz2, .zst."""

from pathlib import Path

from diloco.data.sources.compression import COMPRESSIONS
from diloco.data.sources.document_file import DocumentFile
from diloco.data.sources.json_files import JsonFile, JsonLines
from diloco.data.sources.tables import Csv, Parquet, Tsv
from diloco.data.sources.text_files import TextFile

TEXT_SUFFIXES: tuple[str, ...] = (
    "",  # README, LICENSE, enwik8
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log"),
    *(".html", ".htm", ".xml", ".css", ".toml", ".yaml", ".yml", ".ini", ".cfg"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala"),
    *(".js", ".ts", ".jsx", ".tsx", ".rb", ".pl", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".el"),
    *(".sh", ".bash", ".sql", ".swift", ".lisp", ".cmake"),
)
"""Text files are recognised by suffix alone, without opening them."""

EXPANSION = 3
"""Approximate bytes of text per byte of a compressed file."""

FORMATS: dict[str, type[DocumentFile]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": JsonFile,
    ".csv": Csv,
    ".tsv": Tsv,
    ".parquet": Parquet,
    **dict.fromkeys(TEXT_SUFFIXES, TextFile),
}
"""By suffix. Parquet has its own compression."""


def format_of(path: Path) -> type[DocumentFile] | None:
    """The format of a file, by its suffix; None if unknown."""
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return FORMATS.get(suffix)
    # README without a suffix is text, but the content of x.gz is unknown.
    inner = FORMATS.get(Path(path.stem).suffix.lower()) if Path(path.stem).suffix else None
    return None if inner is Parquet else inner


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSIONS or path.suffix.lower() == ".parquet"


def stem_of(path: Path) -> str:
    """The name without the suffixes of format and compression."""
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSIONS else path.stem


def known_suffixes() -> str:
    """The suffixes that can be read, for messages."""
    return f"{' '.join(suffix or '(none)' for suffix in FORMATS)}; all but .parquet also with {' '.join(COMPRESSIONS)}"
