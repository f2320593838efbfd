"""Text to token numbers and back: a byte-level BPE, lossless for any text.

`tokenizers` does the work and is imported when it is needed, not before. Text is encoded as text: the letters
`<|endoftext|>` in a document become ordinary tokens, never the special one. Refuses a tokenizer without an
end-of-text token, since documents could not be told apart.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, final

from diloco.errors import DataError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""What other people's tokenizers call it; the first that is there is taken."""


@final
class Tokenizer:
    """A tokenizer with an end-of-text token. `vocab_size` is the rows a model's embedding needs."""

    def __init__(self, inner: Any, name: str) -> None:
        """`inner`: a `tokenizers.Tokenizer`; `name`: what to call it in messages."""
        vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        token = next((token for token in END_OF_TEXT_NAMES if token in vocabulary), None)
        if token is None:
            raise DataError(
                f"data.tokenizer {name!r} has no end-of-text token (tried {' '.join(END_OF_TEXT_NAMES)}); "
                "add one as a special token, or leave data.tokenizer out to have one trained"
            )
        inner.encode_special_tokens = True  # see the module's docstring
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.end_of_text: int = vocabulary[token]
        # Not len(vocabulary): a tokenizer may leave numbers out.
        self.vocab_size: int = max(vocabulary.values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """A BPE of at most `vocab_size` tokens: fewer where the texts have no more pairs to merge."""
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        inner: Any = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            # All 256 bytes, seen or not, sorted: what makes it lossless, and the same on every machine.
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner, "trained")

    @staticmethod
    def read(path: str | Path) -> str:
        """The content of a tokenizer.json, not yet parsed."""
        try:
            return Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"data.tokenizer {str(path)!r} cannot be read: {error}; give the path of a tokenizer.json"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a tokenizer.json."""
        from tokenizers import Tokenizer as Inner

        content = cls.read(path)
        try:
            inner = Inner.from_str(content)
        except Exception as error:  # tokenizers raises no narrower type
            raise DataError(
                f"data.tokenizer {str(path)!r} is not a tokenizer.json of the tokenizers library: {error}"
            ) from error
        return cls(inner, str(path))

    def to_json(self) -> str:
        """What a tokenizer.json holds."""
        return str(self._inner.to_str())

    def encode(self, text: str) -> list[int]:
        """The tokens of one text, without anything added at its ends."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, on all cores."""
        encoded = self._inner.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, tokens: Sequence[int], skip_end_of_text: bool = False) -> str:
        """The text of some tokens; bytes that are no whole character come out as U+FFFD."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=skip_end_of_text))
