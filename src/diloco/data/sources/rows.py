"""A row of a file or dataset as a document, and what becomes of a row that cannot be one.

`Rows` is the contract. `data.format` says how rows are read:

text         {"text": "…"}, or a row that is a text itself
chat         {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
             {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
completion   {"prompt": "…", "completion": "…"}, both texts or both lists of messages

The answers (what the assistant wrote; the completion) are what the model learns to write, unless data.loss_on = all.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

from diloco.data.config import DataConfig
from diloco.data.sources.base import Document, Spans
from diloco.data.sources.chat_template import ChatTemplate, Message, load_template
from diloco.errors import DataError

MESSAGE_FIELDS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""Names of roles in `conversations`."""


class Rows(ABC):
    """How rows are read."""

    needs_fields = True
    """Whether a text without fields cannot be a row."""
    chat_template: str | None = None
    """The Jinja template that writes conversations, if rows have them."""

    def __init__(self, label: str | None = None, *, skip: bool = False) -> None:
        """`label`: the field with the label. `skip`: leave bad rows out instead of raising DataError."""
        self.label = label
        self.skip = skip

    @property
    @abstractmethod
    def names(self) -> list[str] | None:
        """List the fields to read of a table; None: all, because rows may differ."""

    @abstractmethod
    def read(self, row: object, where: str) -> Document:
        """Return the document of one row, without its label; DataError if there is none. `where` names the row."""

    @abstractmethod
    def identity(self) -> object:
        """Return JSON of everything but the rows that determines the documents."""

    def document(self, row: object, where: str) -> Document:
        """Return the document of one row with its label, or with its problem."""
        try:
            document = self.read(row, where)
            if self.label is None:
                return document
            if not isinstance(row, dict):
                raise DataError(f"{where} has no fields, hence no label (data.label_field {self.label!r})")
            return document._replace(label=self._label(row, where))
        except DataError as error:
            return self.bad(str(error))

    def check_columns(self, columns: list[str]) -> None:
        """Refuse a table that lacks a field, which concerns all its rows; the message goes on after its name."""
        for name, option in self._needed():
            if name not in columns:
                raise DataError(missing_field(dict.fromkeys(columns), name, option, "").lstrip())

    def _needed(self) -> list[tuple[str, str]]:
        """List the fields that a table must have, with the options that name them."""
        return [] if self.label is None else [(self.label, "data.label_field")]

    def bad(self, problem: str, *, is_file: bool = False) -> Document:
        """Refuse a row or file that cannot be used: raises DataError, or returns the document that says so."""
        if self.skip:
            return Document("", problem=problem, is_file=is_file)
        what = "files" if is_file else "rows"
        raise DataError(f"{problem}. To leave such {what} out: --data.on_bad_row skip")

    def _label(self, row: dict[str, Any], where: str) -> str:
        assert self.label is not None
        value = field_of(row, self.label, "data.label_field", where)
        if not isinstance(value, str | int) or value == "":
            raise DataError(
                f"{where}: field {self.label!r} is {shortened(value)}, not a label; repair or remove the row"
            )
        return checked_text(str(value), self.label, where)


@final
class TextRows(Rows):
    """Rows with a text, in the field `text`; a row that is a text itself needs no field."""

    needs_fields = False

    def __init__(self, text: str = "text", label: str | None = None, *, skip: bool = False) -> None:
        super().__init__(label, skip=skip)
        self.text = text

    @property
    def names(self) -> list[str]:
        return [self.text] if self.label is None else [self.text, self.label]

    def identity(self) -> object:
        return self.names

    def _needed(self) -> list[tuple[str, str]]:
        return [(self.text, "data.text_field"), *super()._needed()]

    def read(self, row: object, where: str) -> Document:
        if isinstance(row, str):
            return Document(checked_text(row, "", where))
        if not isinstance(row, dict):
            raise DataError(f"{where} is neither a text nor an object with fields, but {shortened(row)}")
        value = field_of(row, self.text, "data.text_field", where)
        return Document(checked_text(value, self.text, where))


@final
class ChatRows(Rows):
    """Rows with a conversation, which a chat template writes."""

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
    """Rows with a prompt and its completion."""

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
                fields_text = ", ".join(map(str, row)) or "none"
                raise DataError(
                    f"{where} has no field {name!r}; its fields are: {fields_text}. Rename them, or repair the row"
                )
        prompt = row["prompt"]
        completion = row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            if isinstance(self._template, DataError):
                raise DataError(f"{where} has messages, not texts: {self._template}")
            prompt_messages = read_messages(prompt, "prompt", where)
            completion_messages = read_messages(completion, "completion", where)
            return _rendered(
                self._template,
                [*prompt_messages, *completion_messages],
                row.get("tools"),
                self._answers_only,
                where,
                len(prompt_messages),
            )
        prompt_text = checked_text(prompt, "prompt", where)
        answer = checked_text(completion, "completion", where)
        if not answer:
            raise DataError(f"{where}: field 'completion' is empty, so there is nothing to learn; remove the row")
        text = prompt_text + answer
        return Document(text, answers=((len(prompt_text), len(text)),) if self._answers_only else None, is_passage=True)


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], tools: object, answers_only: bool, where: str, first: int = 0
) -> Document:
    """Return the document of a conversation; answers before the message number `first` are not learnt."""
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
    """Return messages with `role` and `content`; those of `conversations` have `from` and `value`."""
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: field {field!r} is {shortened(value)}, not a list of messages; repair or remove the row"
        )
    return [_message(message, f"{where}: message {number} of {field!r}") for number, message in enumerate(value, 1)]


def _message(value: Any, where: str) -> Message:
    message = value
    if isinstance(value, dict) and "from" in value and "value" in value:
        message = {"role": _ROLES.get(str(value["from"]), value["from"]), "content": value["value"]}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise DataError(
            f'{where} is {shortened(message)}, but must have "role" and "content"; repair or remove the row'
        )
    content = message["content"]
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if not isinstance(content, str):
        raise DataError(f"{where} has the content {shortened(content)}, not a text; repair or remove the row")
    return message


def _template_identity(template: ChatTemplate) -> object:
    return [template.source, sorted(template.special_tokens.items())]


def rows_of(config: DataConfig) -> Rows:
    """Return how the rows of a run's source are read."""
    if config.format == "chat":
        return ChatRows(config)
    if config.format == "completion":
        return CompletionRows(config)
    return TextRows(config.text_field, config.label_field, skip=config.on_bad_row == "skip")


# Fields of a row


def field_of(row: dict[str, Any], name: str, option: str, where: str) -> Any:
    if name not in row:
        raise DataError(missing_field(row, name, option, where))
    return row[name]


def missing_field(row: dict[str, Any], name: str, option: str, where: str) -> str:
    """Say which fields there are, and what to do about it."""
    fields_text = ", ".join(map(str, row)) or "none"
    message = f"{where} has no field {name!r}; its fields are: {fields_text}. Choose one with --{option}"
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if "messages" in row or "conversations" in row:
        return f"{message}; for conversations: --data.format chat"
    if "prompt" in row and "completion" in row:
        return f"{message}; for prompts and completions: --data.format completion"
    if len(lists) == 1:
        return f"{message}; if {lists[0]!r} holds the rows, take them out: jq -c '.{lists[0]}[]' FILE > rows.jsonl"
    return message


def checked_text(value: object, name: str, where: str) -> str:
    """Check a value that must be Unicode text; `name` is its field."""
    field = f": field {name!r}" if name else ""
    if not isinstance(value, str):
        raise DataError(f"{where}{field} is {shortened(value)}, not a text; repair or remove the row")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}{field} is not Unicode text ({error}); repair the row") from error
    return value


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
