"""The tokenizer: lossless, deterministic, and never fooled by text that looks like a special token."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.data.tokenizer import END_OF_TEXT, Tokenizer
from diloco.errors import DataError

TEXT = [
    "def main() -> None:\n    print('hello, world')\n" * 3,
    "The quick brown fox jumps. " * 5,
    "äöü €uro 你好",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXT, 300)


@given(text=st.text(max_size=200))
@settings(deadline=None, max_examples=150)
def test_any_unicode_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)


@pytest.mark.parametrize("text", ["", " ", "\r\n\t  x  \n", f"a{END_OF_TEXT}b", "\ufeffx", "e\u0301 \U0001f600\0"])
def test_awkward_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_spells_the_special_token_does_not_become_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_text not in tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT
    assert tokenizer.decode([tokenizer.end_of_text], skip_end_of_text=True) == ""


def test_training_is_deterministic_and_merges_make_text_shorter(tokenizer: Tokenizer) -> None:
    assert Tokenizer.train(TEXT, 300).to_json() == tokenizer.to_json()
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(TEXT[1])) < len(TEXT[1]) / 2


def test_vocabulary_is_as_large_as_the_text_supports() -> None:
    tokenizer = Tokenizer.train(["ab"], 5000)
    assert tokenizer.vocab_size == 256 + 1 + 1  # the bytes, end of text, "ab"


def test_batch_encoding_equals_encoding_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(TEXT) == [tokenizer.encode(text) for text in TEXT]


def test_saved_tokenizer_loads_equal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = Tokenizer.load(path)
    assert loaded.encode_batch(TEXT) == tokenizer.encode_batch(TEXT)
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)


def test_missing_broken_and_unsuitable_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.json.*cannot be read"):
        Tokenizer.load(tmp_path / "nowhere.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"broken\.json.*is not a tokenizer\.json"):
        Tokenizer.load(broken)
    from tokenizers import Tokenizer as Inner
    from tokenizers import models

    Inner(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "plain.json"))
    with pytest.raises(DataError, match=r"plain\.json.*no end-of-text token"):
        Tokenizer.load(tmp_path / "plain.json")
