"""Rows for fine-tuning: conversations, or prompts with their completions.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
    {"prompt": "…", "completion": "…"}          both texts, or both lists of messages

The answers (what the assistant wrote; the completion) are what the model learns to write, unless data.loss_on = all.
"""

from collections.abc import Sequence
from typing import Any, final

from diloco.data.config import DataConfig
from diloco.data.sources.base import Document, Spans
from diloco.data.sources.chat_template import ChatTemplate, Message, load_template
from diloco.data.sources.rows import Rows, checked_text, field_of, missing_field, shortened
from diloco.errors import DataError

MESSAGE_FIELDS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""Names of roles in `conversations`."""


@final
class ChatRows(Rows):
    def __init__(self, config: DataConfig) -> None:
        super().__init__(config.label_field, skip=config.on_bad_row == "skip")
        self._field = None if config.text_field == "text" else config.text_field
        self._answers_only = config.learns_answers_only
        self._template = load_template(config)
        self.chat_template = self._template.source

    @property
    def names(self) -> None:
        return None

    def identity(self) -> object:
        return ["chat", self._field, self.label, _template_identity(self._template), self._answers_only]

    def read(self, row: object, where: str) -> Document:
        if not isinstance(row, dict):
            raise DataError(f"{where} is not an object with fields, but {shortened(row)}")
        field = self._field or next((name for name in MESSAGE_FIELDS if name in row), None)
        if field is None:
            raise DataError(missing_field(row, MESSAGE_FIELDS[0], "data.text_field", where))
        messages = read_messages(field_of(row, field, "data.text_field", where), field, where)
        return _rendered(self._template, messages, row.get("tools"), self._answers_only, where)


@final
class CompletionRows(Rows):
    def __init__(self, config: DataConfig) -> None:
        super().__init__(config.label_field, skip=config.on_bad_row == "skip")
        self._answers_only = config.learns_answers_only
        self._template: ChatTemplate | DataError
        try:
            self._template = load_template(config)
        except DataError as error:  # needed only if prompts are lists of messages
            if config.chat_template is not None:
                raise
            self._template = error
        else:
            self.chat_template = self._template.source

    @property
    def names(self) -> None:
        return None

    def identity(self) -> object:
        template = None if isinstance(self._template, DataError) else _template_identity(self._template)
        return ["completion", self.label, template, self._answers_only]

    def _needed(self) -> list[tuple[str, str]]:
        return [("prompt", "data.format"), ("completion", "data.format"), *super()._needed()]

    def read(self, row: object, where: str) -> Document:
        if not isinstance(row, dict):
            raise DataError(f"{where} is not an object with fields, but {shortened(row)}")
        for name in ("prompt", "completion"):
            if name not in row:
                there = ", ".join(map(str, row)) or "none"
                raise DataError(
                    f"{where} has no field {name!r}; its fields are: {there}. Rename them, or repair the row"
                )
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            if isinstance(self._template, DataError):
                raise DataError(f"{where} has messages, not texts: {self._template}")
            asked = read_messages(prompt, "prompt", where)
            answered = read_messages(completion, "completion", where)
            return _rendered(
                self._template, [*asked, *answered], row.get("tools"), self._answers_only, where, len(asked)
            )
        asked_text, answer = checked_text(prompt, "prompt", where), checked_text(completion, "completion", where)
        if not answer:
            raise DataError(f"{where}: field 'completion' is empty, so there is nothing to learn; remove the row")
        text = asked_text + answer
        return Document(text, answers=((len(asked_text), len(text)),) if self._answers_only else None, is_passage=True)


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], tools: object, answers_only: bool, where: str, first: int = 0
) -> Document:
    """The document of a conversation; answers before the message number `first` are not learnt."""
    spans: Spans = ()
    try:
        if answers_only:
            text, spans = template.write_answers(messages, tools)
        else:
            text = template.write(messages, tools)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    checked_text(text, "", where)
    if not answers_only:
        return Document(text, is_passage=True, is_chat=True)
    earlier = sum(message["role"] == "assistant" for message in messages[:first])
    answers: Spans = tuple(span for span in spans[earlier:] if span[0] < span[1])
    if not answers:
        raise DataError(
            f"{where} has no message of the assistant, so there is nothing to learn; remove the row, or learn all "
            "tokens (--data.loss_on all)"
        )
    return Document(text, answers=answers, is_passage=True, is_chat=True)


def read_messages(value: object, field: str, where: str) -> list[Message]:
    """Messages with `role` and `content`; those of `conversations` have `from` and `value`."""
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: field {field!r} is {shortened(value)}, not a list of messages; repair or remove the row"
        )
    return [_message(one, f"{where}: message {number} of {field!r}") for number, one in enumerate(value, 1)]


def _message(one: Any, where: str) -> Message:
    if isinstance(one, dict) and "from" in one and "value" in one:
        one = {"role": _ROLES.get(str(one["from"]), one["from"]), "content": one["value"]}
    if not isinstance(one, dict) or not isinstance(one.get("role"), str) or "content" not in one:
        raise DataError(f'{where} is {shortened(one)}, but must have "role" and "content"; repair or remove the row')
    if one["content"] is None and one.get("tool_calls"):
        return {**one, "content": ""}
    if not isinstance(one["content"], str):
        raise DataError(f"{where} has the content {shortened(one['content'])}, not a text; repair or remove the row")
    return one


def _template_identity(template: ChatTemplate) -> object:
    return [template.source, sorted(template.special_tokens.items())]
