"""`diloco data list` and `diloco data clear`: the prepared corpora in the cache."""

import sys
import time
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.cli.display.live import PipeSafeConsole
from diloco.data.config import DataConfig
from diloco.data.preparation.corpus_cache import CachedCorpus, cache_root, delete_corpus, list_corpora
from diloco.errors import ConfigError, DataError

CacheDir = Annotated[str | None, Parameter(name="--data.cache_dir", help="The cache folder (default: the usual one).")]

_WIDEST = 1000


def list_cache(*, cache_dir: CacheDir = None) -> None:
    """List the prepared corpora in the cache, with their sizes."""
    console = PipeSafeConsole()
    root = cache_root(DataConfig(cache_dir=cache_dir))
    corpora = list_corpora(root)
    if not corpora:
        console.print(Text(f"no prepared corpora in {root}"), soft_wrap=True)
        return
    table = Table("corpus", "documents", "tokens", "size", "last used", "state", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for one in corpora:
        numbers = ["–" if count is None else f"{count:,}" for count in (one.documents, one.tokens)]
        table.add_row(one.name, *numbers, size_text(one.size_bytes), age(one), one.state)
    console.width = _WIDEST  # a name is for pasting: the terminal may fold a line, the table never does
    console.print(table)
    console.print(
        Text(f"{len(corpora)} in {root}, {size_text(sum(one.size_bytes for one in corpora))}"), soft_wrap=True
    )


def clear(
    *names: str,
    everything: Annotated[bool, Parameter(name="--all", negative="", help="All that no run uses.")] = False,
    yes: Annotated[bool, Parameter(name="--yes", negative="", help="Do not ask.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Delete prepared corpora that no run uses.

    Parameters
    ----------
    names
        The corpora to delete, as `diloco data list` shows them.
    """
    console = PipeSafeConsole()
    root = cache_root(DataConfig(cache_dir=cache_dir))
    corpora = list_corpora(root)
    chosen = _chosen(corpora, names, everything, root)
    free = [one for one in chosen if one.is_free]
    for one in chosen:
        if not one.is_free:
            console.print(Text(f"kept: {one.name} ({one.state})"), soft_wrap=True)
    if not free:
        if chosen and not everything:
            raise DataError("nothing was deleted: what you named is in use; stop the runs that read it first")
        console.print(Text(f"nothing to delete in {root}"), soft_wrap=True)
        return
    if not yes and not _confirmed(console, free):
        console.print("nothing was deleted", highlight=False)
        return
    deleted = 0
    for one in free:
        try:
            delete_corpus(one)
        except DataError as error:  # a run has begun to use it
            console.print(Text(f"kept: {error}"), soft_wrap=True)
        else:
            deleted += one.size_bytes
            console.print(Text(f"deleted: {one.name} ({size_text(one.size_bytes)})"), soft_wrap=True)
    console.print(f"{size_text(deleted)} freed", highlight=False)


def _chosen(corpora: list[CachedCorpus], names: tuple[str, ...], everything: bool, root: Path) -> list[CachedCorpus]:
    if everything == bool(names):
        raise ConfigError("`diloco data clear` deletes what you name: give names of `diloco data list`, or --all")
    if everything:
        return corpora
    known = {one.name for one in corpora}
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "`diloco data list` shows what there is"
            raise ConfigError(f"there is no corpus {name!r} in {root}: {hint}")
    return [one for one in corpora if one.name in names]


def _confirmed(console: Console, corpora: list[CachedCorpus]) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("`diloco data clear` asks before it deletes, and there is no terminal to ask at: add --yes")
    what = corpora[0].name if len(corpora) == 1 else f"{len(corpora)} corpora"
    size = size_text(sum(one.size_bytes for one in corpora))
    answer = console.input(Text(f"Delete {what} ({size})? They can be prepared again from their sources. [y/N] "))
    return answer.strip().lower() in ("y", "yes")


def age(corpus: CachedCorpus) -> str:
    seconds = max(0.0, time.time() - corpus.last_used)
    for unit, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def size_text(count: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
