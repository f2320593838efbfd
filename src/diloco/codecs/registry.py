"""The codecs by name.

To add one: a subclass of Codec, a line here, its name in core/config.py (SyncConfig.codec), a row in
docs/configuration.md.
"""

from diloco.codecs.base import Codec
from diloco.codecs.floats import BFloat16, Float16, Float32
from diloco.codecs.integers import Int8
from diloco.errors import ConfigError

CODECS: dict[str, type[Codec]] = {
    "fp32": Float32,
    "fp16": Float16,
    "bf16": BFloat16,
    "int8": Int8,
}


def codec(name: str) -> Codec:
    """A new codec of that name."""
    if name not in CODECS:
        raise ConfigError(f"codec '{name}' is unknown: choose one of {', '.join(CODECS)}")
    return CODECS[name]()
