"""Conversations with a model: `diloco generate` and `diloco chat` write what the model's chat template asks for, and an
answer ends where the template ends one."""

import io
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.cli.main import run
from diloco.data.sources.chat_template import CHATML, ChatTemplate
from diloco.models import text_generator
from diloco.models.text_generator import PromptTokenizer, until
from support.pretrained_models import make_folder

NO_PROMPT = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
"""A template that neither knows add_generation_prompt nor marks the end of a turn."""


def make_chat_folder(folder: Path, template: str = CHATML) -> Path:
    make_folder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_folder(tmp_path_factory.mktemp("models") / "chat")


def expected(folder: Path, messages: list[dict[str, str]], count: int = 8) -> str:
    """The answer of transformers, as it is shown."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), 0]
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=ends,
    )
    text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


def talk(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str, *options: str, count: int = 8) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return run(["chat", str(folder), f"--max-tokens={count}", *options])


def test_generate_asks_a_chat_model_with_its_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(folder), "now", "--max-tokens", "8", "--greedy"]) == 0
    assert capsys.readouterr().out == expected(folder, [{"role": "user", "content": "now"}]) + "\n"
    assert run(["generate", str(folder), "now", "--max-tokens", "8", "--greedy", "--raw"]) == 0
    assert capsys.readouterr().out.startswith("now")


def test_each_line_without_a_terminal_is_a_message_that_is_answered_with_the_conversation_before_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = text_generator.TextGenerator.answer

    def answer(self: Any, conversation: str, *rest: Any, **choice: Any) -> Iterator[str]:
        asked.append(conversation)
        return real(self, conversation, *rest, **choice)

    monkeypatch.setattr(text_generator.TextGenerator, "answer", answer)
    assert talk(monkeypatch, folder, "a\n\nb\n", "--greedy", "--system", "s", count=2) == 0
    system, question = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
    first = expected(folder, [system, question], 2)
    out = capsys.readouterr().out
    assert out.startswith(first + "\n")
    template = ChatTemplate(CHATML, {}, "")
    assert asked[0] == template.ask([system, question])
    assert asked[1].startswith(asked[0]) and asked[1].endswith(template.ask([{"role": "user", "content": "b"}]))


@pytest.mark.parametrize("at_once", [True, False])
def test_an_answer_ends_at_the_end_of_its_turn(
    at_once: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`at_once`: the end is one special token; otherwise it is ordinary letters, in several tokens."""
    folder = make_chat_folder(tmp_path / "m", CHATML if at_once else NO_PROMPT)
    end = "<|im_end|>" if at_once else "\n[user]"
    tokens = PromptTokenizer(folder).encode_conversation(f"then{end} more")

    def stream(_: object, __: Sequence[int], ___: int, ____: object, ends: Container[int]) -> Iterator[int]:
        for token in tokens:
            if token in ends:
                return
            yield token

    monkeypatch.setattr(text_generator, "stream", stream)
    assert talk(monkeypatch, folder, "a\n", "--greedy") == 0
    assert capsys.readouterr().out.rstrip("\n") == "then"


def test_a_template_without_a_generation_prompt_shows_what_precedes_and_what_follows_an_answer() -> None:
    template = ChatTemplate(NO_PROMPT, {}, "")
    assert template.ask([{"role": "user", "content": "a"}]) == "[user] a\n[assistant] "
    assert template.answer_end() == "[user]"
    assert ChatTemplate(CHATML, {}, "").answer_end() == "<|im_end|>"


@pytest.mark.parametrize("text", ["ab</s>cd", "a</s", "</s>", "a<</s>", "plain"])
def test_text_before_an_end_is_the_same_however_it_is_cut_into_pieces(text: str) -> None:
    for width in range(1, len(text) + 1):
        pieces = [text[at : at + width] for at in range(0, len(text), width)]
        assert "".join(until(pieces, "</s>")) == text.partition("</s>")[0]


def test_a_full_window_drops_the_oldest_messages_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert talk(monkeypatch, folder, "one\ntwo\nthree\nfour\n" * 2, "--greedy") == 0
    captured = capsys.readouterr()
    assert "note: the window is full: the 2 oldest messages are left out" in captured.err
    assert talk(monkeypatch, folder, "much " * 50, "--greedy") == 2
    assert "this message does not fit the model's window" in capsys.readouterr().err


def test_a_model_without_a_template_is_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_folder(tmp_path / "plain")
    assert talk(monkeypatch, plain, "a\n") == 2
    assert "has no chat template, so it cannot be talked with: train on conversations" in capsys.readouterr().err
    assert run(["generate", str(plain), "a", "--raw"]) == 2
    assert "--raw has no effect" in capsys.readouterr().err


def test_the_help_of_chat_fits_a_screen_and_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert any("diloco chat runs/" in line for line in lines)
