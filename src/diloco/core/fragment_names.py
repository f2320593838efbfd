"""Which parameters are in which fragment: §2 of Streaming DiLoCo (arXiv 2501.18512).

A model's blocks are dealt out to `fragments` fragments, strided (block i to fragment i mod P, the paper's choice) or
sequential (runs of neighbouring blocks). Everything outside the blocks (embeddings, final norm, head) is one more
fragment. By hand, a fragment is a list of patterns.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from diloco.core.config import SyncConfig
from diloco.errors import ConfigError


def assign(names: Sequence[str], sync: SyncConfig) -> list[list[str]]:
    """The names of each fragment; every name is in exactly one.

    A name's block is the first number in it: `model.layers.3.mlp.up_proj.weight` is in block 3.
    """
    if sync.fragments_by_hand is not None:
        return _by_hand(names, sync.fragments_by_hand)
    if sync.fragments == 1:
        return [list(names)]
    numbers = {name: re.search(r"(?:^|\.)(\d+)\.", name) for name in names}
    blocks = sorted({int(number[1]) for number in numbers.values() if number})
    if len(blocks) < sync.fragments:
        raise ConfigError(
            f"fragments = {sync.fragments}, but the model has {len(blocks)} numbered blocks: "
            f"use at most {max(1, len(blocks))} fragments"
        )
    groups: list[list[str]] = [[] for _ in range(sync.fragments + 1)]
    for name, number in numbers.items():
        if number is None:
            index = sync.fragments
        elif sync.fragment_order == "strided":
            index = int(number[1]) % sync.fragments
        else:
            index = blocks.index(int(number[1])) * sync.fragments // len(blocks)
        groups[index].append(name)
    return [group for group in groups if group]


def _by_hand(names: Sequence[str], text: str) -> list[list[str]]:
    """`text`: fragments separated by semicolons, each a list of patterns with commas, as in `*embed*; *.0.*, *.1.*`."""
    fragments = [[pattern.strip() for pattern in part.split(",") if pattern.strip()] for part in text.split(";")]
    if not all(fragments):
        raise ConfigError(f"sync.fragments_by_hand = {text!r} has a fragment without a pattern: remove its semicolon")
    matches = {
        name: [i for i, patterns in enumerate(fragments) if any(fnmatchcase(name, pattern) for pattern in patterns)]
        for name in names
    }
    for name, places in matches.items():
        if len(places) != 1:
            where = "no fragment" if not places else f"the fragments {', '.join(str(i + 1) for i in places)}"
            raise ConfigError(
                f"sync.fragments_by_hand = {text!r} puts parameter '{name}' into {where}: every parameter must be in "
                "exactly one"
            )
    for patterns in fragments:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"sync.fragments_by_hand: the pattern {pattern!r} matches no parameter; a name is {names[0]!r}"
                )
    return [[name for name in names if matches[name] == [index]] for index in range(len(fragments))]
