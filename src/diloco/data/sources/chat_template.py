"""A chat template: the Jinja program with which a tokenizer writes a conversation as one text.

It runs in Jinja's sandbox, which keeps it from files, processes and Python's internals. Templates get no clock
(`strftime_now` is undefined), so that a corpus does not depend on the day on which it was prepared.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from diloco.data.config import DataConfig
from diloco.data.sources.base import Spans
from diloco.data.tokenizer import find_tokenizer
from diloco.errors import DataError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMED = {"chatml": CHATML}

_BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode reserves these two for such use inside a program

_CONTENT = "\ufdd2"
"""A message whose place in a written conversation is looked for."""
_NEXT = "\ufdd3"

Message = Mapping[str, Any]


@final
class ChatTemplate:
    """A tokenizer's or a user's template, which writes conversations and says which characters the assistant wrote."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str) -> None:
        """`name`: the template's name in messages."""
        from jinja2 import TemplateError

        self.source = source
        self.special_tokens = dict(special_tokens)
        self.name = name
        self._marks = "endgeneration" in source
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise DataError(f"{name} is not a Jinja template: {error}; repair it") from error

    def write(self, messages: Sequence[Message], tools: object = None) -> str:
        """Write a conversation."""
        text = self._text(messages, tools)
        return _unmarked(text)[0] if self._marks else text

    def write_answers(self, messages: Sequence[Message], tools: object = None) -> tuple[str, Spans]:
        """Write a conversation; returns also the ranges of characters that the assistant wrote."""
        text = self._text(messages, tools)
        if self._marks:
            if any(mark in message["content"] for message in messages for mark in (_BEGIN, _END)):
                raise DataError(
                    "a message has the character U+FDD0 or U+FDD1, which Unicode excludes from texts; remove it"
                )
            return _unmarked(text)
        return text, tuple(
            (self._start(text, messages[:number], tools), self._end(text, messages, number + 1, tools))
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        )

    def ask(self, messages: Sequence[Message]) -> str:
        """Write a conversation up to where the assistant's next message begins."""
        prompt_text = self._text(messages, None, prompt=True)
        if not messages or prompt_text != self._text(messages, None):
            return _unmarked(prompt_text)[0] if self._marks else prompt_text
        # A template that does not know add_generation_prompt: all before the answer in a conversation that has one.
        return self.write([*messages, {"role": "assistant", "content": _CONTENT}]).partition(_CONTENT)[0]

    def answer_end(self) -> str:
        """Return the text that follows an answer, without spaces: the end of the turn or, if there is no mark of it,
        the beginning of the user's next message. Empty if the template does not show it."""
        question = {"role": "user", "content": "x"}
        answer = {"role": "assistant", "content": _CONTENT}
        for conversation in ([question, answer], [question, answer, {"role": "user", "content": _NEXT}]):
            try:
                after = self.write(conversation).partition(_CONTENT)[2].partition(_NEXT)[0].strip()
            except DataError:  # such as a template that wants a system message
                after = ""
            if after:
                return after
        return ""

    def _start(self, text: str, before: Sequence[Message], tools: object) -> int:
        """Find where an answer begins: after what the template writes to ask for one."""
        for prompt in (True, False):
            beginning = self._text(before, tools, prompt=prompt) if before or prompt else ""
            if text.startswith(beginning):
                return len(beginning)
        raise DataError(self._unsteady(len(before)))

    def _end(self, text: str, messages: Sequence[Message], count: int, tools: object) -> int:
        """Find where the first `count` messages end."""
        beginning = text if count == len(messages) else self._text(messages[:count], tools)
        if not text.startswith(beginning):
            raise DataError(self._unsteady(count))
        return len(beginning)

    def _unsteady(self, messages: int) -> str:
        return (
            f"{self.name} writes the first {messages} messages in another way when more follow, so the answers cannot "
            "be told apart; give a template with {% generation %} around them (--data.chat_template FILE), or learn "
            "all tokens (--data.loss_on all)"
        )

    def _text(self, messages: Sequence[Message], tools: object, *, prompt: bool = False) -> str:
        values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            return str(self._template.render(**values, **self.special_tokens))
        except Exception as error:  # a template is a program, which may fail in any way: 1 / 0, endless recursion
            raise DataError(f"{self.name} refuses the conversation: {str(error) or type(error).__name__}") from error


def folder_template(folder: Path) -> ChatTemplate | None:
    """Return the template of a model folder, with its tokenizer's special tokens; None if the model has none."""
    tokenizer = find_tokenizer(folder)
    if tokenizer.chat_template is None:
        return None
    return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, f"the chat template of {folder}")


def load_template(config: DataConfig) -> ChatTemplate:
    """Load the template of data.chat_template or else of the tokenizer; DataError with the remedy if there is none."""
    tokenizer = None if config.tokenizer is None else find_tokenizer(config.tokenizer)
    special = {} if tokenizer is None else tokenizer.special_tokens
    name = config.chat_template
    if name is not None and name in NAMED:
        return ChatTemplate(NAMED[name], special, f"the template {name!r}")
    if name is not None:
        path = Path(name).expanduser()
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"data.chat_template {name!r} cannot be read: {error}; give a file with a Jinja template, or "
                f"{' or '.join(NAMED)}"
            ) from error
        return ChatTemplate(source, special, f"the template {name}")
    if tokenizer is None or tokenizer.chat_template is None:
        problem = (
            "no tokenizer is given"
            if tokenizer is None
            else f"data.tokenizer {config.tokenizer!r} has no chat template"
        )
        raise DataError(
            f"data.format = {config.format} needs a chat template, and {problem}: give one with --data.chat_template "
            "FILE, or use a common one with --data.chat_template chatml"
        )
    return ChatTemplate(tokenizer.chat_template, special, f"the chat template of {config.tokenizer}")


def _unmarked(text: str) -> tuple[str, Spans]:
    """Return the text without the marks of {% generation %}, and the ranges between them."""
    parts = []
    spans = []
    length = 0
    for number, piece in enumerate(text.replace(_END, _BEGIN).split(_BEGIN)):
        if number % 2:
            spans.append((length, length + len(piece)))
        parts.append(piece)
        length += len(piece)
    return "".join(parts), tuple(spans)


def _environment() -> Any:
    """Jinja as `transformers` sets it up for chat templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %}: what the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment
