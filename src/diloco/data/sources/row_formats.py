"""How the rows of a run's source are read, by `data.format`."""

from diloco.data.config import DataConfig
from diloco.data.sources.rows import Rows, TextRows


def rows_of(config: DataConfig) -> Rows:
    skip = config.on_bad_row == "skip"
    return TextRows(config.text_field, config.label_field, skip=skip)
