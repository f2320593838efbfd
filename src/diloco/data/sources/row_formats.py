"""How the rows of a run's source are read, by `data.format`."""

from diloco.data.config import DataConfig
from diloco.data.sources.chat_rows import ChatRows, CompletionRows
from diloco.data.sources.rows import Rows, TextRows


def rows_of(config: DataConfig) -> Rows:
    if config.format == "chat":
        return ChatRows(config)
    if config.format == "completion":
        return CompletionRows(config)
    return TextRows(config.text_field, config.label_field, skip=config.on_bad_row == "skip")
