"""The texts of the laboratory's runs: one that all workers share, and one whose parts differ.

The defaults are on every machine: the Python library and, for arms whose workers read different texts, its largest
packages, a file each. Asyncio, e-mail, XML and so on differ in words and habits, though far less than books, law and
code do.
"""

import platform
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import final

from diloco.atomic_files import write_file
from diloco.data.config import DataConfig
from diloco.data.corpus import META, Corpus
from diloco.data.preparation.corpus_cache import cache_root, prepare
from diloco.data.sources.local import StandardLibrary
from diloco.errors import DataError
from diloco.lab.run_options import STDLIB
from diloco.lab.scales import Scale

DOMAINS = 8
SINGLE = "modules"
"""The domain of modules that are in no package."""


@final
@dataclass(frozen=True)
class Texts:
    """The corpora of a run by role, opened when they are first needed."""

    text: str
    domains: str
    scale: Scale

    def open(self, role: str) -> Corpus:
        return open_text(getattr(self, role), self.scale, role)


def open_text(source: str, scale: Scale, role: str) -> Corpus:
    """Open a text: the folder of a prepared corpus, or a source of `diloco train`, prepared once in the cache."""
    folder = Path(source)
    if (folder / META).is_file():
        return Corpus.open(folder)
    if role == "text":
        return prepare(DataConfig(source=source, vocab_size=scale.vocab_size, max_bytes=scale.text_bytes))
    parts = str(library_domains(scale.text_bytes)) if source == STDLIB else source
    return prepare(DataConfig(source=parts, vocab_size=scale.vocab_size, partition="labels", shards=DOMAINS))


def library_domains(most_bytes: int | None) -> Path:
    """Write eight packages of the Python library as files, each of at most an eighth of `most_bytes`, once in the
    cache. Returns their folder."""
    name = f"lab-domains-{platform.python_version()}-{most_bytes or 'all'}"
    folder = cache_root(DataConfig()) / name
    if len(list(folder.glob("*.txt"))) == DOMAINS:
        return folder
    by_domain: dict[str, list[Path]] = defaultdict(list)
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not StandardLibrary.EXCLUDED_FOLDERS.intersection(parts):
            by_domain[SINGLE if len(parts) == 1 else parts[0]].append(path)
    if len(by_domain) < DOMAINS:
        raise DataError(f"the Python library in {root} has no {DOMAINS} packages: give another text with --domains")
    sizes = {domain: sum(path.stat().st_size for path in paths) for domain, paths in by_domain.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for domain in sorted(sizes, key=lambda domain: (-sizes[domain], domain))[:DOMAINS]:
        text = "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in by_domain[domain])
        write_file(folder / f"{domain}.txt", text.encode()[: most_bytes and most_bytes // DOMAINS])
    return folder
