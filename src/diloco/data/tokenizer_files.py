"""Loads a tokenizer from a tokenizer.json, a Hugging Face folder, or a name on the hub (`hf:gpt2`).

A folder's tokenizer_config.json or special_tokens_map.json names the end-of-text token. A folder with only a
SentencePiece model is converted by transformers if it can (extra `hf`). Without a network, a tokenizer of the hub comes
from the local cache.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from diloco.data.sources.hub import HUB_SECONDS, PREFIX, hub_error
from diloco.errors import DataError, SourceUnavailable, install_hint

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer.json that may name the end-of-text token."""


class TokenizerFile(NamedTuple):
    content: str
    """The text of tokenizer.json, not yet parsed."""
    end_of_text: str | None
    """The end-of-text token that the files beside it name, if any."""


def find_tokenizer(spec: str | Path) -> TokenizerFile:
    """The tokenizer that `data.tokenizer = spec` names."""
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
    return TokenizerFile(content, _end_of_text(lambda name: path.parent / name))


def _end_of_text(find: Callable[[str], Path | None]) -> str | None:
    for name in TOKENIZER_CONFIG_FILES:
        path = find(name)
        if path is None or not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as JSON: {error}; repair or remove it") from error
        token = config.get("eos_token") if isinstance(config, dict) else None
        if isinstance(token, dict):  # older versions write a token with its properties
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _from_hub(spec: str) -> TokenizerFile:
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise DataError(f"data.tokenizer {spec!r} needs huggingface_hub: {install_hint('hf')}") from error
    name = spec.removeprefix(PREFIX)
    what = f"data.tokenizer {spec!r}"
    problem: DataError | None = None
    try:  # one request with a time limit: the libraries would retry for half a minute
        files = {file.rfilename for file in HfApi().model_info(name, timeout=HUB_SECONDS).siblings or ()}
    except Exception as error:  # any error of the HTTP library below
        problem, files = hub_error(what, error), set()
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
            raise hub_error(what, error) from error

    path = fetch(TOKENIZER_FILE)
    if path is not None:
        return _from_folder(path, spec)._replace(end_of_text=_end_of_text(fetch))
    if problem is not None:
        raise problem
    return _converted(name, spec)


def _converted(name: str, spec: str) -> TokenizerFile:
    """Let transformers convert it: it can make a fast tokenizer of some slow ones."""
    what = f"data.tokenizer {spec!r} has no {TOKENIZER_FILE}"
    try:
        with _quiet():
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise DataError(f"{what}, and to convert what it has: {install_hint('hf')} ({error})") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{what}, and transformers cannot convert what it has: {reason}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{what}, and its tokenizer ({type(tokenizer).__name__}) has no fast form: choose another")
    end_of_text = tokenizer.eos_token
    return TokenizerFile(tokenizer.backend_tokenizer.to_str(), None if end_of_text is None else str(end_of_text))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warnings of transformers; the error raised afterwards names the problem once."""
    import logging

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
