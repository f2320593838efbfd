"""Conversations and completions: the tokens are those of the tokenizer's own template, and only answers are learnt."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from diloco.data.config import DataConfig
from diloco.data.corpus import META, TOKENIZER, Corpus, CorpusMeta
from diloco.data.order import WorkerBatches, check_validation, validation_batches
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.received_corpus import corpus_files, receive_files, receive_metadata
from diloco.data.sources.chat_template import CHATML
from diloco.data.tokenizer import Tokenizer
from diloco.errors import ConfigError, DataError
from support.pretrained_models import make_tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n\n{{ message.content | trim }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
MISTRAL = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('no role ' + message['role']) }}{% endif %}{% endfor %}"
)
GENERATION = (
    "{%- for message in messages %}\n{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n{% else %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNSTEADY = "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = [
    {"role": "user", "content": "Wie heißt du? <|im_end|>"},
    {"role": "assistant", "content": "Ich heiße nicht."},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "then 👍"},
]


def tokenizer_with(folder: Path, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "bos_token": "<|im_start|>"}
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(folder: Path, rows: list[dict[str, Any]], **options: Any) -> DataConfig:
    """The first conversation is for training, and so are most."""
    defaults = {"format": "chat", "tokenizer": str(folder), "shards": 1, "validation_fraction": 0.2}
    source = write_rows(folder / "rows.jsonl", rows)
    return DataConfig(source=str(source), cache_dir=str(folder / "cache"), **defaults | options)


def chats(count: int = 12) -> list[dict[str, Any]]:
    return [{"messages": [{**CHAT[0], "content": f"number {i}"}, CHAT[1]]} for i in range(count)]


def stored(corpus: Corpus) -> tuple[list[int], list[bool]]:
    """The tokens of the first shard and whether they are learnt."""
    raw = np.asarray(corpus.shard(0), np.int64)
    bit = corpus.mask_bit or 0
    return (raw & ~bit).tolist(), (raw & bit == 0).tolist()


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, GENERATION], ids=["chatml", "llama3", "mistral", "tags"])
def test_tokens_are_those_of_transformers_and_exactly_the_answers_are_learnt(tmp_path: Path, template: str) -> None:
    theirs = tokenizer_with(tmp_path, template)
    corpus = prepare(config(tmp_path, [{"messages": CHAT}, *chats()]))
    tokens, learnt = stored(corpus)
    expected = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    if template == MISTRAL:  # it ends with the end-of-text token, which is not written twice
        assert expected[-1] == theirs.eos_token_id
    else:
        expected = [*expected, theirs.eos_token_id]
    assert tokens[: len(expected)] == expected
    assert tokens[len(expected)] != theirs.eos_token_id
    answers, run = [], []
    for token, is_learnt in zip(expected, learnt, strict=False):
        if is_learnt:
            run.append(token)
        elif run:
            answers.append(theirs.decode(run))
            run = []
    answers += [theirs.decode(run)] if run else []
    assert [answer.replace("<|im_end|>", "").replace(theirs.eos_token, "").strip() for answer in answers] == [
        "Ich heiße nicht.",
        "then 👍",
    ]
    end = theirs.eos_token if template == MISTRAL else "<|im_end|>"
    assert all(end in answer for answer in answers), "the model learns to end its answers"
    if template == GENERATION:
        mask = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)[
            "assistant_masks"
        ]
        assert [int(flag) for flag in learnt[: len(mask)]] == mask
    assert corpus.meta.learnt_tokens == sum(learnt) < corpus.train_tokens
    assert 0 < (corpus.meta.validation_learnt_tokens or 0) < corpus.meta.validation_tokens


def test_the_older_form_of_conversations_is_the_same(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, CHATML)
    names = {"user": "human", "assistant": "gpt"}
    rows = [{"messages": CHAT}, *chats()]
    older = [
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in row["messages"]]} for row in rows
    ]
    assert prepare(config(tmp_path, rows)).digest == prepare(config(tmp_path, older)).digest


def test_a_completion_is_learnt_with_its_end_and_the_prompt_is_not(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, None)
    rows = [{"prompt": f"question {i} <|im_end|> = ", "completion": f"answer {i}"} for i in range(12)]
    corpus = prepare(config(tmp_path, rows, format="completion"))
    tokens, learnt = stored(corpus)
    tokenizer = Tokenizer.load(tmp_path)
    first = tokenizer.encode("question 0 <|im_end|> = answer 0")
    assert tokens[: len(first) + 1] == [*first, tokenizer.end_of_text], "plain text: no template, no special tokens"
    learnt_tokens = [token for token, is_learnt in zip(tokens[: len(first) + 1], learnt, strict=False) if is_learnt]
    assert tokenizer.decode(learnt_tokens[:-1]).strip() == "answer 0" and learnt_tokens[-1] == tokenizer.end_of_text
    everything = prepare(config(tmp_path, rows, format="completion", loss_on="all"))
    assert not everything.meta.masked and everything.train_tokens == corpus.train_tokens
    assert stored(everything)[0] == tokens


def test_prompts_of_messages_use_the_template_and_only_the_completion_is_learnt(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, CHATML)
    rows = [
        {"prompt": CHAT[:3], "completion": CHAT[3:]},
        *({"prompt": f"{i}", "completion": "x" * 40} for i in range(9)),
    ]
    corpus = prepare(config(tmp_path, rows, format="completion"))
    tokens, learnt = stored(corpus)
    learnt_tokens = [token for token, is_learnt in zip(tokens, learnt, strict=True) if is_learnt]
    assert Tokenizer.load(tmp_path).decode(learnt_tokens).startswith("then 👍<|im_end|>")


def test_windows_carry_the_mask_through_batches_and_validation(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, CHATML)
    corpus = prepare(config(tmp_path, chats(40), shards=2))
    batches = WorkerBatches(corpus, 8, 2, [0, 1], seed=0)
    windows = np.concatenate([batches.batch(i) for i in range(batches.sequences_per_epoch // 2)])
    assert ((windows >= -corpus.vocab_size) & (windows < corpus.vocab_size)).all()
    assert (windows >= 0).any() and (windows < 0).any()
    unmasked = prepare(config(tmp_path, chats(40), shards=2, loss_on="all"))
    same = WorkerBatches(unmasked, 8, 2, [0, 1], seed=0)
    tokens = np.concatenate([same.batch(i) for i in range(same.sequences_per_epoch // 2)])
    assert (np.where(windows < 0, ~windows, windows) == tokens).all()
    assert any((batch < 0).any() for batch in validation_batches(corpus, 8, 2))
    assert corpus.digest != unmasked.digest


def test_a_validation_text_without_an_answer_in_its_windows_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, None)
    rows = [{"prompt": f"{i} " + "many words " * 40, "completion": "x"} for i in range(40)]
    corpus = prepare(config(tmp_path, rows, format="completion", validation_fraction=0.05))
    check_validation(corpus, 32)
    with pytest.raises(DataError, match=r"no answer is in the validation windows of 16 .*data\.validation_fraction"):
        check_validation(corpus, 16, limit=1)


def test_a_received_corpus_keeps_its_mask_and_a_sender_cannot_remove_it(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, CHATML)
    corpus = prepare(config(tmp_path, chats(40), shards=2))
    files = corpus_files(corpus)

    def fetch(name: str, path: Path, *_: object) -> None:
        path.write_bytes(files[name].read_bytes())

    meta = receive_metadata(tmp_path / "received", corpus.digest, fetch)
    received = receive_files(tmp_path / "received", meta, [0, 1], fetch, lambda *_: None)  # type: ignore[arg-type]
    assert stored(received) == stored(corpus) and received.mask_bit == corpus.mask_bit

    def lie(name: str, path: Path) -> None:
        fetch(name, path)
        if name == META:
            path.write_text(replace(CorpusMeta.from_json(path.read_text()), masked=False).to_json())

    with pytest.raises(DataError, match="digest of its tokenizer and files differs"):
        receive_metadata(tmp_path / "other", corpus.digest, lie)
    assert (corpus.folder / TOKENIZER).is_file()


def test_without_a_template_the_error_names_the_remedy_and_the_remedy_works(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, None)
    with pytest.raises(DataError, match=r"has no chat template: .*--data\.chat_template FILE.*chatml"):
        prepare(config(tmp_path, chats()))
    with pytest.raises(DataError, match=r"no tokenizer is given"):
        prepare(config(tmp_path, chats(), tokenizer=None, vocab_size=300))
    named = prepare(config(tmp_path, chats(), chat_template="chatml"))
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert prepare(config(tmp_path, chats(), chat_template=str(tmp_path / "mine.jinja"))).digest == named.digest
    assert prepare(config(tmp_path, chats(200), tokenizer=None, vocab_size=300, chat_template="chatml")).meta.masked
    for bad in ("{% for %}", None):
        path = tmp_path / ("bad.jinja" if bad else "nowhere")
        if bad:
            path.write_text(bad)
        with pytest.raises(DataError, match=r"(bad\.jinja is not a Jinja template|nowhere.*cannot be read)"):
            prepare(config(tmp_path, chats(), chat_template=str(path)))


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: .*refuses the conversation: .*unsafe"):
        prepare(config(tmp_path, chats()))


@pytest.mark.parametrize("fails", ["1 / 0", "range(1000000)", "'{5}'.format(1)", "again()"])
def test_a_template_that_fails_in_any_way_refuses_the_conversation(tmp_path: Path, fails: str) -> None:
    tokenizer_with(tmp_path, "{% macro again() %}{{ again() }}{% endmacro %}{{ " + fails + " }}")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: .*refuses the conversation: "):
        prepare(config(tmp_path, chats()))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, r"field 'messages' is \[\], not a list of messages"),
        ({"messages": "hello"}, r"not a list of messages"),
        ({"messages": [{"role": "user"}]}, r"message 1 of 'messages' .*must have \"role\" and \"content\""),
        ({"messages": [{"role": "user", "content": 3}]}, r"message 1 .*the content 3, not a text"),
        ({"messages": CHAT[:1]}, r"no message of the assistant.*--data\.loss_on all"),
        ({"messages": [{"role": "system", "content": "x"}, *CHAT]}, r"refuses the conversation: no role system"),
        ({"text": "plain"}, r"has no field 'messages'; its fields are: text"),
    ],
)
def test_a_bad_conversation_is_named_by_file_and_line_or_left_out(tmp_path: Path, row: Any, reason: str) -> None:
    tokenizer_with(tmp_path, MISTRAL)
    rows = [*chats(6), row, *chats(20)[6:]]
    with pytest.raises(DataError, match=r"rows\.jsonl, line 7.*" + reason):
        prepare(config(tmp_path, rows))
    assert prepare(config(tmp_path, rows, on_bad_row="skip")).meta.skipped == {"unreadable rows": 1}


def test_a_template_that_writes_messages_differently_later_is_refused_unless_all_is_learnt(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, UNSTEADY)
    rows = [{"messages": CHAT}, *chats()]
    with pytest.raises(DataError, match=r"in another way when more follow.*generation.*--data\.loss_on all"):
        prepare(config(tmp_path, rows))
    assert not prepare(config(tmp_path, rows, loss_on="all")).meta.masked


def test_another_template_is_another_corpus(tmp_path: Path) -> None:
    tokenizer_with(tmp_path, CHATML)
    before = prepare(config(tmp_path, chats())).folder
    tokenizer_with(tmp_path, MISTRAL)
    assert prepare(config(tmp_path, chats())).folder != before


def test_options_for_conversations_are_refused_elsewhere(tmp_path: Path) -> None:
    for options in ({"chat_template": "chatml"}, {"loss_on": "all"}):
        with pytest.raises(ConfigError, match=r"is for conversations: add --data\.format chat"):
            DataConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"reads the fields prompt and completion"):
        DataConfig(format="completion", text_field="body")
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(DataError, match=r"plain text only.*data\.format"):
        prepare(DataConfig(source=str(tmp_path), format="chat", chat_template="chatml"))
