"""Loads a tokenizer from a tokenizer.json, a Hugging Face folder, or a name on the hub (`hf:gpt2`).

A folder's tokenizer_config.json or special_tokens_map.json names the end-of-text token. A folder with only a
SentencePiece model is converted by transformers if it can (extra `hf`). Without a network, a tokenizer of the hub comes
from the local cache.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from diloco.data.hub_errors import HUB_SECONDS, PREFIX, hub_error
from diloco.errors import DataError, SourceUnavailable, install_hint

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer.json that may name the end-of-text token."""

CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Files beside a tokenizer.json that may have its chat template, the first one found counts."""


class TokenizerFile(NamedTuple):
    content: str
    """The text of tokenizer.json, not yet parsed."""
    end_of_text: str | None
    """The end-of-text token that the files beside it name, if any."""
    chat_template: str | None = None
    """The Jinja template for conversations, if there is one."""
    special_tokens: Mapping[str, str] = {}
    """`bos_token` and its like, which a chat template may use."""


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
    return _described(content, lambda name: path.parent / name)


def _described(content: str, find: Callable[[str], Path | None]) -> TokenizerFile:
    """A tokenizer.json with what the files beside it say; `find` returns the path of a file, which need not exist."""
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
            named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
            template = named.get("default")
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
        return _described(_from_folder(path, spec).content, fetch)
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
    """Silences the warnings of transformers; the error raised afterwards names the problem once."""
    import logging

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
