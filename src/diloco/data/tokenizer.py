"""Text to token numbers and back: our own byte-level BPE, lossless for any text, or an existing tokenizer.

`tokenizers` is imported only when it is used. Text is encoded as text: the letters `<|endoftext|>` in a document become
ordinary tokens, never the special one. Refuses a tokenizer without an end-of-text token, which separates documents.

An existing tokenizer is a tokenizer.json, a Hugging Face folder, or a name on the hub (`hf:gpt2`). A folder's
tokenizer_config.json or special_tokens_map.json names the end-of-text token. A folder with only a SentencePiece model
is converted by transformers if it can (extra `hf`). Without a network, a tokenizer of the hub comes from the local
cache.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

from diloco.atomic_files import write_file
from diloco.data.hub_errors import HUB_SECONDS, PREFIX, hub_error
from diloco.errors import DataError, SourceUnavailable, install_hint

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""Common names of the end-of-text token; the first one found is used if no file beside the tokenizer names it."""

LONGEST_RUN = 256
"""BPE training time grows with the square of the longest word: 256 KiB without a space take a minute."""

LONGEST_WORD = 1024
"""Longer words are encoded in pieces: a BPE takes twice the time for 64 K characters in one word, and much memory."""

_LONG_RUN = re.compile(rf"\S{{{LONGEST_RUN + 1},}}|\s{{{LONGEST_RUN + 1},}}")


TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer.json that may name the end-of-text token."""

CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Files beside a tokenizer.json that may have its chat template, the first one found counts."""


class TokenizerFile(NamedTuple):
    """A tokenizer.json with what the files beside it say."""

    content: str
    """The text of tokenizer.json, not yet parsed."""
    end_of_text: str | None
    """The end-of-text token that the files beside it name, if any."""
    chat_template: str | None = None
    """The Jinja template for conversations, if there is one."""
    special_tokens: Mapping[str, str] = {}
    """`bos_token` and its like, which a chat template may use."""


@final
class Tokenizer:
    """A tokenizer with an end-of-text token. `vocab_size` is the rows a model's embedding needs."""

    def __init__(self, inner: Any, name: str, end_of_text: str | None = None) -> None:
        """`inner`: a `tokenizers.Tokenizer`; `name`: its name in messages."""
        vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        names = END_OF_TEXT_NAMES if end_of_text is None else (end_of_text,)
        token = next((token for token in names if token in vocabulary), None)
        if token is None:
            raise DataError(
                f"data.tokenizer {name!r} has no end-of-text token (tried {' '.join(names)}); "
                "add one as a special token, or leave data.tokenizer out to have one trained"
            )
        inner.encode_special_tokens = True  # see the module's docstring
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.end_of_text: int = vocabulary[token]
        # Not len(vocabulary): a tokenizer may skip numbers.
        self.vocab_size: int = max(vocabulary.values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train a BPE of at most `vocab_size` tokens: fewer if the texts have no more pairs to merge."""
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        inner: Any = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            # All 256 bytes, sorted: it is then lossless, and the same on every machine.
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator((piece for text in texts for piece in cut_runs(text)), trainer)
        return cls(inner, "trained")

    @classmethod
    def load(cls, spec: str | Path) -> "Tokenizer":
        """Load the tokenizer that `data.tokenizer = spec` names: a tokenizer.json, a folder, or hf:NAME."""
        return cls.of(find_tokenizer(spec), str(spec))

    @classmethod
    def of(cls, file: TokenizerFile, name: str) -> "Tokenizer":
        from tokenizers import Tokenizer as Inner

        try:
            inner = Inner.from_str(file.content)
        except Exception as error:  # tokenizers raises no narrower type
            raise DataError(
                f"data.tokenizer {name!r} is not a tokenizer.json of the tokenizers library: {error}"
            ) from error
        return cls(inner, name, file.end_of_text)

    def check_target(self, path: Path) -> None:
        """Refuse a path whose tokenizer_config.json names another end-of-text token than this tokenizer's."""
        check_target(path, self._inner.id_to_token(self.end_of_text))

    def save(self, path: Path) -> None:
        """Write tokenizer.json and, beside it, tokenizer_config.json with the end-of-text token."""
        end_of_text = self._inner.id_to_token(self.end_of_text)
        self.check_target(path)
        write_file(path.with_name(TOKENIZER_CONFIG_FILES[0]), _config_text(end_of_text))
        write_file(path, self.to_json())

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return str(self._inner.to_str())

    def encode(self, text: str) -> list[int]:
        """Encode one text, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text, on all cores. Words of more than LONGEST_WORD characters are cut (`cut_words`)."""
        pieces = [cut_words(text) if self._may_cut else [text] for text in texts]
        # The same tokens, without the characters that each of them stands for.
        encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        encoded = encode([piece for parts in pieces for piece in parts], add_special_tokens=False)
        ids = iter([encoding.ids for encoding in encoded])
        return [_joined([next(ids) for _ in parts]) for parts in pieces]

    @cached_property
    def _may_cut(self) -> bool:
        """Whether a text in pieces is the same text: some tokenizers put a space before every text."""
        once: list[int] = self._inner.encode("x", add_special_tokens=False).ids
        return self.decode([*once, *once]) == "xx"

    def encode_chats(self, texts: Sequence[str], *, special: bool) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the tokens of each text and the characters of each token. `special`: the letters of a special token
        are it, as in a rendered chat template."""
        self._inner.encode_special_tokens = not special
        try:
            encoded = self._inner.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        return [(encoding.ids, encoding.offsets) for encoding in encoded]

    def decode(self, tokens: Sequence[int], skip_end_of_text: bool = False) -> str:
        """Return the text of some tokens; bytes that are no whole character come out as U+FFFD."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=skip_end_of_text))


def check_target(path: Path, end_of_text: str = END_OF_TEXT) -> None:
    """Refuse a path for a tokenizer.json whose tokenizer_config.json belongs to another tokenizer."""
    beside = path.with_name(TOKENIZER_CONFIG_FILES[0])
    if beside.exists() and beside.read_bytes() != _config_text(end_of_text).encode():
        raise DataError(
            f"{path} is written with a {beside.name} beside it, but {beside} exists and differs: choose another folder"
        )


def _config_text(end_of_text: str) -> str:
    return json.dumps({"eos_token": end_of_text}) + "\n"


def cut_words(text: str) -> list[str]:
    """Cut a text into pieces whose words have at most LONGEST_WORD characters.

    A long word is cut before a punctuation mark if it has one: a byte-level BPE cuts there by itself, so the tokens
    stay the same. A word of letters and digits only is cut anywhere, which changes a few tokens around the cut.
    """
    if len(text) <= LONGEST_WORD or max(map(len, text.split()), default=0) <= LONGEST_WORD:
        return [text]
    pieces = []
    start = 0
    for word in re.finditer(rf"\S{{{LONGEST_WORD + 1},}}", text):
        position = word.start()
        while word.end() - position > LONGEST_WORD:
            position = _cut_before(text, position + LONGEST_WORD // 2, position + LONGEST_WORD)
            pieces.append(text[start:position])
            start = position
    return [*pieces, text[start:]]


def _cut_before(text: str, first: int, last: int) -> int:
    """Find the last place from `first` to `last` where a punctuation mark follows a letter or digit; else `last`."""
    for position in range(last, first, -1):
        if text[position - 1].isalnum() and not text[position].isalnum():
            return position
    return last


def _joined(parts: list[list[int]]) -> list[int]:
    return parts[0] if len(parts) == 1 else [token for part in parts for token in part]


def cut_runs(text: str) -> Iterator[str]:
    """Cut a text into pieces whose runs of spaces, or of other characters, have at most LONGEST_RUN characters."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        for end in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield text[start:end]
            start = end
    yield text[start:]


# Where a tokenizer comes from


def find_tokenizer(spec: str | Path) -> TokenizerFile:
    """Find the tokenizer that `data.tokenizer = spec` names."""
    if str(spec).startswith(PREFIX):
        return _from_hub(str(spec))
    path = Path(spec).expanduser()
    if path.is_dir() and not (path / TOKENIZER_FILE).is_file():
        return _converted(str(path), str(spec))
    return _from_folder(path if not path.is_dir() else path / TOKENIZER_FILE, spec)


def _from_folder(path: Path, spec: str | Path) -> TokenizerFile:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.tokenizer {str(spec)!r} cannot be read: {error}; give a tokenizer.json, a folder with it, or hf:X"
        ) from error
    return _described(content, lambda name: path.parent / name)


def _described(content: str, find: Callable[[str], Path | None]) -> TokenizerFile:
    """Read what the files beside a tokenizer.json say; `find` returns the path of a file, which need not exist."""
    special: dict[str, str] = {}
    for name in reversed(TOKENIZER_CONFIG_FILES):  # the first one counts
        config = _read_json(find(name))
        special |= {key: _token(value) for key, value in config.items() if key.endswith("_token") and _token(value)}
    return TokenizerFile(content, special.get("eos_token"), _chat_template(find), special)


def _token(value: object) -> str:
    if isinstance(value, dict):  # older versions write a token with its properties
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _chat_template(find: Callable[[str], Path | None]) -> str | None:
    for name in CHAT_TEMPLATE_FILES:
        path = find(name)
        if path is None or not path.is_file():
            continue
        if path.suffix == ".jinja":
            return path.read_text(encoding="utf-8")
        template = _read_json(path).get("chat_template")
        if isinstance(template, list):  # several, by name
            template_by_name = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = template_by_name.get("default")
        if isinstance(template, str):
            return template
    return None


def _read_json(path: Path | None) -> dict[str, Any]:
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}; repair or remove it") from error
    return config if isinstance(config, dict) else {}


def _from_hub(spec: str) -> TokenizerFile:
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise DataError(f"data.tokenizer {spec!r} needs huggingface_hub: {install_hint('hf')}") from error
    name = spec.removeprefix(PREFIX)
    subject = f"data.tokenizer {spec!r}"
    problem: DataError | None = None
    try:  # one request with a time limit: the libraries would retry for half a minute
        files = {file.rfilename for file in HfApi().model_info(name, timeout=HUB_SECONDS).siblings or ()}
    except Exception as error:  # any error of the HTTP library below
        problem = hub_error(subject, error)
        files = set()
        if not isinstance(problem, SourceUnavailable):
            raise problem from error

    def fetch(file: str) -> Path | None:
        if problem is None and file not in files:
            return None
        try:
            return Path(hf_hub_download(name, file, local_files_only=problem is not None))
        except Exception as error:
            if problem is not None:
                return None
            raise hub_error(subject, error) from error

    path = fetch(TOKENIZER_FILE)
    if path is not None:
        return _described(_from_folder(path, spec).content, fetch)
    if problem is not None:
        raise problem
    return _converted(name, spec)


def _converted(name: str, spec: str) -> TokenizerFile:
    """Let transformers convert it: it can make a fast tokenizer of some slow ones."""
    problem = f"data.tokenizer {spec!r} has no {TOKENIZER_FILE}"
    try:
        with _quiet():
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise DataError(f"{problem}, and to convert what it has: {install_hint('hf')} ({error})") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{problem}, and transformers cannot convert what it has: {reason}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{problem}, and its tokenizer ({type(tokenizer).__name__}) has no fast form: choose another")
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    template = tokenizer.chat_template
    return TokenizerFile(
        tokenizer.backend_tokenizer.to_str(),
        special.get("eos_token"),
        template if isinstance(template, str) else None,
        special,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of transformers; the error raised afterwards names the problem once."""
    import logging

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
