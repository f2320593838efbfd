"""The tokenizer in a model folder: tokenizer.json and the small files that tell `transformers` how to use it.

A model that was fine-tuned with its own tokenizer keeps that tokenizer's files unchanged (chat template included); any
other tokenizer gets a plain tokenizer_config.json. Refuses a tokenizer with more tokens than the model has vectors.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from diloco.atomic_files import write_file
from diloco.errors import ConfigError
from diloco.models.folders import write_json
from diloco.models.pretrained import TOKENIZER_FILE

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TOKENIZER_FILES = (
    *(TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, "added_tokens.json"),
    # Its stop tokens are the tokenizer's.
    "generation_config.json",
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
"""The files of a tokenizer of `transformers`; a folder has some of them."""


def open_tokenizer(path: Path) -> Any:
    """Open the `tokenizers.Tokenizer` of a tokenizer.json."""
    if not path.is_file():
        raise ConfigError(f"the tokenizer {path} does not exist: give the path of a tokenizer.json")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower type
        raise ConfigError(f"{path} is not a tokenizer.json of the tokenizers library: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def is_same_tokenizer(path: Path, other_path: Path) -> bool:
    """Whether two tokenizer.json files describe the same tokenizer, whatever their layout."""
    return (
        path.is_file() and other_path.is_file() and open_tokenizer(path).to_str() == open_tokenizer(other_path).to_str()
    )


def check_tokenizer(path: Path, vocab_size: int, end_of_text: str | None) -> int | None:
    """Raise unless the model has a vector for every token; returns the id of `end_of_text`."""
    tokenizer = open_tokenizer(path)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"the tokenizer {path} has token {largest}: the model's vocabulary is 0 to {vocab_size - 1}; "
            f"give the tokenizer that the model was trained with"
        )
    if end_of_text is None:
        return None
    token = tokenizer.token_to_id(end_of_text)
    if token is None:
        raise ConfigError(f"end_of_text is {end_of_text!r}: the tokenizer {path} has no such token")
    return int(token)


def write_tokenizer(folder: Path, path: Path, end_of_text: str | None, max_length: int | None) -> None:
    """Write tokenizer.json and a tokenizer_config.json with which `transformers` encodes and decodes losslessly."""
    write_file(folder / TOKENIZER_FILE, path.read_bytes())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Byte-level text round-trips only if decoding does not tidy up spaces.
        "clean_up_tokenization_spaces": False,
        **({} if max_length is None else {"model_max_length": max_length}),
        **({} if end_of_text is None else {"eos_token": end_of_text}),
    }
    write_json(folder / TOKENIZER_CONFIG_FILE, config)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy all tokenizer files of one model folder into another, unchanged."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            write_file(folder / name, (source / name).read_bytes())
