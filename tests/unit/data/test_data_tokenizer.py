"""The tokenizer: lossless, deterministic, and never fooled by text that looks like a special token."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from diloco.data.tokenizer import END_OF_TEXT, LONGEST_RUN, LONGEST_WORD, Tokenizer, cut_runs, cut_words, find_tokenizer
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


def words(*tokens: str) -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, pre_tokenizers

    inner: Any = Inner(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return inner


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "<stop>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<stop>", "lstrip": False}}),
        ("special_tokens_map.json", {"eos_token": "<stop>"}),
    ],
)
def test_the_files_of_a_folder_say_which_token_ends_a_text(tmp_path: Path, name: str, content: object) -> None:
    words("a", "</s>", "<stop>").save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).end_of_text == 1  # nothing says more: the first of the usual names
    (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).end_of_text == 2
    assert Tokenizer.load(tmp_path / "tokenizer.json").end_of_text == 2


def test_an_end_of_text_that_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    words("a", "</s>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(DataError, match=r"no end-of-text token \(tried <stop>\)"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json cannot be read as JSON"):
        Tokenizer.load(tmp_path)


def test_a_saved_tokenizer_keeps_its_unusual_end_of_text(tmp_path: Path) -> None:
    words("a", "</s>", "<stop>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    (tmp_path / "copy").mkdir()
    Tokenizer.load(tmp_path).save(tmp_path / "copy" / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "copy" / "tokenizer.json").end_of_text == 2


def test_a_sentencepiece_folder_is_converted(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text.txt").write_text("\n".join(f"the {i} quick brown foxes jump over lazy dogs" for i in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=120,
        model_type="bpe", byte_fallback=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    tokenizer = Tokenizer.load(tmp_path)
    tokens = tokenizer.encode("quick brown foxes")
    assert tokenizer.decode(tokens).strip() == "quick brown foxes"
    assert tokenizer.end_of_text == 2
    assert len(tokens) < len("quick brown foxes") / 2


def test_a_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer\.json, and transformers cannot convert what it has"):
        Tokenizer.load(tmp_path)


class FakeHub:
    """A hub with one model, or an unreachable one."""

    def __init__(self, folder: Path, error: Exception | None) -> None:
        self.folder, self.error = folder, error

    def model_info(self, *_: object, **__: object) -> "FakeHub":
        if self.error is not None:
            raise self.error
        return self

    @property
    def siblings(self) -> list[Any]:
        return [type("File", (), {"rfilename": path.name}) for path in self.folder.iterdir()]

    def download(self, _name: str, file: str, local_files_only: bool) -> str:
        assert local_files_only == (self.error is not None)
        if not (self.folder / file).exists():
            raise FileNotFoundError(file)
        return str(self.folder / file)


@pytest.mark.parametrize("error", [None, ConnectionError("Name or service not known")])
def test_a_tokenizer_of_the_hub_is_taken_and_from_its_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    words("a", "</s>", "<stop>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    fake = FakeHub(tmp_path, error)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: fake)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fake.download)
    assert Tokenizer.load("hf:some/model").end_of_text == 2


def test_a_tokenizer_of_the_hub_that_cannot_be_reached_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(tmp_path, ConnectionError("Name or service not known"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: fake)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fake.download)
    with pytest.raises(DataError, match=r"data\.tokenizer 'hf:gpt2' cannot be reached.*check the network"):
        find_tokenizer("hf:gpt2")


@given(text=st.text(alphabet="ab \n\t", max_size=900) | st.integers(0, 3000).map(lambda n: "x" * n))
@settings(deadline=None)
def test_cutting_long_runs_loses_nothing_and_leaves_none(text: str) -> None:
    pieces = list(cut_runs(text))
    assert "".join(pieces) == text
    for piece in pieces:
        assert all(len(word) <= LONGEST_RUN for word in piece.split())


def test_text_of_ordinary_words_is_not_cut() -> None:
    assert list(cut_runs("some words\n" * 200)) == ["some words\n" * 200]


def test_a_long_line_without_spaces_is_learnt_from_in_pieces() -> None:
    """Training takes time in the square of a word's length: a line of 50 MB without a space took minutes."""
    whole, pieces = Tokenizer.train(["ab" * 5000], 300), Tokenizer.train(["ab" * (LONGEST_RUN // 2)] * 40, 300)
    assert max(len(token) for token in whole._inner.get_vocab()) <= LONGEST_RUN
    assert whole.encode("abab" * 20) == pieces.encode("abab" * 20)


@pytest.mark.parametrize("word", ["base64+text/", "日本語、", "a_b-c.d", "x" * 40 + "\u0301é!"])
def test_a_long_word_is_encoded_in_pieces_with_the_same_tokens(tokenizer: Tokenizer, word: str) -> None:
    text = f"before {word * (3 * LONGEST_WORD // len(word))} after\n" * 2
    pieces = cut_words(text)
    assert "".join(pieces) == text and len(pieces) > 4
    assert max(len(part) for piece in pieces for part in piece.split()) <= LONGEST_WORD
    whole = tokenizer._inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_batch(["short", text]) == [tokenizer.encode("short"), whole]


def test_a_word_without_punctuation_is_cut_anywhere_and_nothing_is_lost(tokenizer: Tokenizer) -> None:
    text = "abcdef" * LONGEST_WORD
    assert max(map(len, cut_words(text))) == LONGEST_WORD
    assert tokenizer.decode(tokenizer.encode(text)) == text
    short = "ordinary words " * LONGEST_WORD
    assert cut_words(short) == [short]


def test_a_tokenizer_that_begins_every_text_with_a_space_gets_words_whole(tokenizer: Tokenizer) -> None:
    inner = type(tokenizer._inner).from_str(tokenizer.to_json())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    spaced = Tokenizer(inner, "spaced")
    text = "abc-" * LONGEST_WORD
    assert len(cut_words(text)) > 1 and spaced.encode(text) == inner.encode(text, add_special_tokens=False).ids
