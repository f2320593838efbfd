"""Prompts in, text out token by token: the pieces are the text, whole characters each, whatever the tokenizer."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from diloco.errors import ConfigError
from diloco.models.text_generator import PromptTokenizer
from support.pretrained_models import END, make_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return PromptTokenizer(folder)


def sentencepiece_like(folder: Path, *, end: bool = False) -> Path:
    """As Llama's: spaces are ▁, unknown characters are bytes, a start token in front, a decoder that strips a space."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "c", "a", "t", "▁c"]
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocabulary, [("▁", "c")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if end else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return folder


@given(prompt=st.text(min_size=1), text=st.text())
def test_the_pieces_of_any_text_are_the_text(byte_level: PromptTokenizer, prompt: str, text: str) -> None:
    before = byte_level.encode(prompt)
    tokens = byte_level._inner.encode(text, add_special_tokens=False).ids
    plain = byte_level._decode([*before, *tokens])
    assert "".join(byte_level.pieces(before, tokens)) == plain[len(byte_level._decode(before)) :]


def test_a_character_of_several_tokens_comes_out_once_it_is_whole(byte_level: PromptTokenizer) -> None:
    tokens = byte_level.encode("a🙂b")
    assert len(tokens) == 6
    assert list(byte_level.pieces([], tokens)) == ["a", "🙂", "b"]


def test_bytes_that_never_become_a_character_come_out_all_the_same(byte_level: PromptTokenizer) -> None:
    first_bytes = byte_level.encode("🙂")[:1]
    pieces = list(byte_level.pieces([], first_bytes * 9))
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 9
    assert len(pieces) > 1


def test_spaces_between_words_survive_a_decoder_that_strips_the_first(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(sentencepiece_like(tmp_path))
    prompt = tokenizer.encode("cat")
    tokens = tokenizer._inner.encode("cat é cat", add_special_tokens=False).ids
    assert list(tokenizer.pieces(prompt, tokens))[:2] == [" c", "a"]
    assert "".join(tokenizer.pieces(prompt, tokens)) == " cat é cat"


def test_a_prompt_gets_what_its_model_expects_in_front_and_never_an_end(tmp_path: Path) -> None:
    for end in (False, True):
        tokenizer = PromptTokenizer(sentencepiece_like(tmp_path, end=end))
        assert tokenizer.stop_tokens == {2}
        tokens = tokenizer.encode("cat")
        assert tokens[0] == 1
        assert tokens[-1] != 2
    assert tokenizer.encode("cat</s>")[-1] == 2  # as the user wrote it


def test_every_end_that_the_folder_names_stops_the_text(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    end = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id(END)
    assert PromptTokenizer(tmp_path).stop_tokens == {5, 7, 8, end}


def test_an_empty_prompt_and_a_folder_without_a_tokenizer_are_refused(
    byte_level: PromptTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="the prompt '' has no tokens"):
        byte_level.encode("")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        PromptTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        PromptTokenizer(tmp_path)
