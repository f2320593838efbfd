"""The codecs by name.

To add one: a subclass of Codec, a line here, its name in core/config.py (SyncConfig.codec), a row in
docs/codecs.md.
"""

from diloco.codecs.base import Codec
from diloco.codecs.e3m0 import E3M0
from diloco.codecs.floats import BFloat16, Float16, Float32
from diloco.codecs.integers import Int4, Int8
from diloco.codecs.top_k import TopK
from diloco.codecs.two_bits import TwoBits
from diloco.errors import ConfigError

CODECS: dict[str, type[Codec]] = {
    "fp32": Float32,
    "fp16": Float16,
    "bf16": BFloat16,
    "int8": Int8,
    "int4": Int4,
    "e3m0": E3M0,
    "2bit": TwoBits,
    "topk": TopK,
}


def codec(name: str) -> Codec:
    """Build the codec of that name."""
    if name not in CODECS:
        raise ConfigError(f"codec '{name}' is unknown: choose one of {', '.join(CODECS)}")
    return CODECS[name]()
