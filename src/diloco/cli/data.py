"""`diloco data`: prepare a corpus before any run needs it, train a tokenizer and keep it, list and clear the cache."""

import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from diloco.cli.display.live import PipeSafeConsole
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.order import count_windows
from diloco.data.preparation.builder import train_tokenizer
from diloco.data.preparation.corpus_cache import CachedCorpus, cache_root, delete_corpus, list_corpora
from diloco.data.preparation.corpus_cache import prepare as prepare_corpus
from diloco.data.sources.registry import open_source
from diloco.data.tokenizer import TOKENIZER_CONFIG_FILES, check_target
from diloco.errors import ConfigError, DataError
from diloco.training.config.run import RunConfig
from diloco.training.processes.start import load_features
from diloco.training.sizes.room import size_text

_LINE_SECONDS = 10.0
_WIDEST = 1000

CacheDir = Annotated[str | None, Parameter(name="--data.cache_dir", help="The cache folder (default: the usual one).")]

HELP = {
    "prepare": """\
[bold]diloco data prepare[/] \\[RUN.toml] \\[OPTIONS]

Turn text into token shards, once: `diloco train` with the same data options
then starts at once. After an interruption, run the same command again.

  --data.source X          stdlib, a file or folder (text, .jsonl, .json, .csv,
                           .parquet; also .gz …), or a Hugging Face dataset:
                           hf:NAME\\[:CONFIG]\\[@SPLIT], hf:/FOLDER
  --data.text_field F      the field of a row that is the document (text)
  --data.format F          chat or completion: for fine-tuning, learn answers
  --data.encoding E        of files that are not UTF-8, such as latin-1
  --data.on_bad_row skip   leave unreadable rows and files out, and count them
  --data.max_documents N   take no more of the source; also data.max_bytes
  --data.vocab_size N      train a BPE of N tokens, or use one that exists:
  --data.tokenizer T       tokenizer.json, a folder with one, or hf:NAME
  --data.shards N          disjoint parts; a worker reads one or more
  --data.partition P       iid; labels: whole labels together; clusters:
  --data.feature_model M   similar documents, by features of this model
  --data.cache_dir DIR     where prepared corpora are kept

All options of \\[data]: diloco train --print-config, docs/data.md.
Example:  diloco data prepare --data.source my_texts/ --data.vocab_size 8000""",
    "tokenizer": """\
[bold]diloco data tokenizer[/] \\[RUN.toml] --to tokenizer.json \\[OPTIONS]

Train a byte-level BPE on a source and keep it, to use with --data.tokenizer.

  --to FILE                where to write it, with tokenizer_config.json beside it
  --data.source X          the text to learn from, as in `diloco data prepare`
  --data.vocab_size N      tokens it should have

Example:  diloco data tokenizer --data.source my_texts/ --to tokenizer.json""",
}
_LEARNING = (
    *("source", "format", "text_field", "chat_template", "encoding", "on_bad_row"),
    *("max_documents", "max_bytes", "vocab_size", "validation_fraction"),
)
_OPTIONS = {
    "prepare": ("data.", "model", "device"),
    "tokenizer": (*(f"data.{name}" for name in _LEARNING), "model", "to"),
}
"""What has an effect, by command: `model` brings its recipe's vocabulary."""


def check_options(command: str, tokens: Sequence[str]) -> None:
    """Refuse options of a run that change nothing here; a run file may have them."""
    for token in tokens:
        name = token[2:].partition("=")[0].replace("-", "_") if token.startswith("--") else ""
        known = any(name == option or (option[-1] == "." and name.startswith(option)) for option in _OPTIONS[command])
        if name and not known and name not in ("help", "help_data"):
            raise ConfigError(f"--{name} has no effect on `diloco data {command}`: leave it out")


def prepare(
    file: Path | None = None,
    /,
    *,
    config: Annotated[RunConfig, Parameter(name="*")] = RunConfig(),  # noqa: B008 - frozen
    help_data: Annotated[bool, Parameter(name="--help-data")] = False,
) -> None:
    """Turn text into token shards, once."""
    console = PipeSafeConsole()
    if help_data:
        console.print(HELP["prepare"], highlight=False)
        return
    _check_first(file, "prepare")
    with Preparing(console) as preparing:
        corpus = prepare_corpus(config.data, preparing.show, load_features(config))
    print_corpus(console, corpus, config.data.sequence_length)


def tokenizer(
    file: Path | None = None,
    /,
    *,
    to: Path | None = None,
    config: Annotated[RunConfig, Parameter(name="*")] = RunConfig(),  # noqa: B008 - frozen
    help_data: Annotated[bool, Parameter(name="--help-data")] = False,
) -> None:
    """Train a byte-level BPE and keep it."""
    console = PipeSafeConsole()
    if help_data:
        console.print(HELP["tokenizer"], highlight=False)
        return
    _check_first(file, "tokenizer")
    if to is None:
        raise ConfigError("`diloco data tokenizer` needs a place for the result: --to tokenizer.json")
    if to.exists() or not to.parent.is_dir():
        reason = (
            "exists already: remove it"
            if to.exists()
            else f"cannot be written: there is no folder {to.parent}; make it"
        )
        raise ConfigError(f"--to {to} {reason}, or choose another place")
    check_target(to)
    if config.data.tokenizer is not None:
        raise ConfigError("data.tokenizer is an existing tokenizer: leave it out to train one")
    with Preparing(console) as preparing:
        preparing.show("training the tokenizer", 0, None)
        trained = train_tokenizer(config.data, open_source(config.data))
    trained.save(to)
    beside = f"beside it {TOKENIZER_CONFIG_FILES[0]}, which names the end of a text"
    message = f"{to}: {trained.vocab_size:,} tokens ({beside})"
    console.print(Text(f"{message}; use it with --data.tokenizer {to}"), soft_wrap=True)


def _check_first(file: Path | None, command: str) -> None:
    if file is not None:
        raise ConfigError(f"the run file {file} must come first: diloco data {command} {file} OPTIONS")


class Preparing:
    """A progress bar, or a line now and then where there is no terminal; use it as a context."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        amount = TextColumn("{task.fields[amount]}")
        self._bar = Progress(*columns, amount, TimeRemainingColumn(), console=console, transient=True)
        self._task: TaskID | None = None
        self._stage = ""
        self._next = 0.0

    def __enter__(self) -> "Preparing":
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if isinstance(error, KeyboardInterrupt):
            self.console.print("interrupted; the same command continues from here", highlight=False)

    def show(self, stage: str, done: int, total: int | None) -> None:
        """Show how far a stage is. `total` is None if it is unknown; `done` then counts documents."""
        new = stage != self._stage
        self._stage = stage
        if self.console.is_terminal:
            if new or self._task is None:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(stage, total=total, amount="")
            amount = f"{done:,}" if total is None and done else ""
            self._bar.update(self._task, completed=done, total=total, amount=amount)
        elif new or time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_SECONDS
            how_far = f": {done / total:.0%}" if total else f": {done:,} so far" if done else ""
            self.console.print(f"{stage}{how_far}", highlight=False)


def print_corpus(console: Console, corpus: Corpus, sequence_length: int) -> None:
    """Print a corpus's folder and contents."""
    meta = corpus.meta
    tokens = sorted(meta.shard_tokens)
    sizes = f"{tokens[0]:,}" if tokens[0] == tokens[-1] else f"{tokens[0]:,} to {tokens[-1]:,}"
    windows = sum(count_windows(count, sequence_length) for count in tokens)
    rows = {
        "documents": f"{meta.documents:,}",
        "training tokens": f"{corpus.train_tokens:,} ({windows:,} sequences of {sequence_length})",
        "learnt tokens": "" if meta.learnt_tokens is None else f"{meta.learnt_tokens:,} (answers only)",
        "validation tokens": f"{meta.validation_tokens:,}",
        "vocabulary": f"{corpus.vocab_size:,} tokens, {corpus.bytes_per_token:.2f} bytes a token",
        "shards": f"{corpus.shards} ({meta.partition}) of {sizes} tokens",
        "unigram perplexity": f"{corpus.unigram_perplexity:.1f}",
        "left out": ", ".join(f"{count:,} {reason}" for reason, count in meta.skipped.items()),
        "digest": corpus.digest[:16],
        "folder": str(corpus.folder),
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            grid.add_row(name, Text(value, overflow="fold"))
    console.print(grid)
    if meta.partition != "iid" or meta.label_tokens:
        console.print(shard_table(corpus))


def shard_table(corpus: Corpus) -> Table:
    """Make a table of each shard's size, its most frequent labels, and how pure the labels are."""
    meta = corpus.meta
    table = Table("shard", "tokens", "share", "mostly", title="shards", title_justify="left")
    for shard, tokens in enumerate(meta.shard_tokens):
        inside = sorted(((label[shard], name) for name, label in meta.label_tokens.items()), reverse=True)
        mostly = ", ".join(f"{name} {count / tokens:.0%}" for count, name in inside[:3] if tokens and count)
        table.add_row(str(shard), f"{tokens:,}", f"{tokens / max(1, corpus.train_tokens):.1%}", mostly)
    for label, purity in meta.purity.items():
        table.add_section()
        table.add_row("", f"{sum(meta.label_tokens[label]):,}", "", f"{label}: {purity:.1%} in one shard")
    if meta.overall_purity is not None:
        table.add_row("", "", "", f"purity: {meta.overall_purity:.1%} of all labelled tokens")
    return table


# The cache of prepared corpora


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
    for corpus in corpora:
        numbers = ["–" if count is None else f"{count:,}" for count in (corpus.documents, corpus.tokens)]
        table.add_row(corpus.name, *numbers, size_text(corpus.size_bytes), age(corpus), corpus.state)
    console.width = _WIDEST  # a name is for pasting: the terminal may fold a line, the table never does
    console.print(table)
    total = size_text(sum(corpus.size_bytes for corpus in corpora))
    console.print(Text(f"{len(corpora)} in {root}, {total}"), soft_wrap=True)


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
    free = [corpus for corpus in chosen if corpus.is_free]
    for corpus in chosen:
        if not corpus.is_free:
            console.print(Text(f"kept: {corpus.name} ({corpus.state})"), soft_wrap=True)
    if not free:
        if chosen and not everything:
            raise DataError("nothing was deleted: what you named is in use; stop the runs that read it first")
        console.print(Text(f"nothing to delete in {root}"), soft_wrap=True)
        return
    if not yes and not _confirmed(console, free):
        console.print("nothing was deleted", highlight=False)
        return
    deleted = 0
    for corpus in free:
        try:
            delete_corpus(corpus)
        except DataError as error:  # a run has begun to use it
            console.print(Text(f"kept: {error}"), soft_wrap=True)
        else:
            deleted += corpus.size_bytes
            console.print(Text(f"deleted: {corpus.name} ({size_text(corpus.size_bytes)})"), soft_wrap=True)
    console.print(f"{size_text(deleted)} freed", highlight=False)


def _chosen(corpora: list[CachedCorpus], names: tuple[str, ...], everything: bool, root: Path) -> list[CachedCorpus]:
    if everything == bool(names):
        raise ConfigError("`diloco data clear` deletes what you name: give names of `diloco data list`, or --all")
    if everything:
        return corpora
    known = {corpus.name for corpus in corpora}
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "`diloco data list` shows what there is"
            raise ConfigError(f"there is no corpus {name!r} in {root}: {hint}")
    return [corpus for corpus in corpora if corpus.name in names]


def _confirmed(console: Console, corpora: list[CachedCorpus]) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("`diloco data clear` asks before it deletes, and there is no terminal to ask at: add --yes")
    what = corpora[0].name if len(corpora) == 1 else f"{len(corpora)} corpora"
    size = size_text(sum(corpus.size_bytes for corpus in corpora))
    answer = console.input(Text(f"Delete {what} ({size})? They can be prepared again from their sources. [y/N] "))
    return answer.strip().lower() in ("y", "yes")


def age(corpus: CachedCorpus) -> str:
    """Say how long ago a corpus was last used."""
    seconds = max(0.0, time.time() - corpus.last_used)
    for unit, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
