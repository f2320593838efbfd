"""The scope of an option, declared beside it: whether it may change on resume, differ between workers, be unused.

    offload: bool = option(False, may_change=True, may_differ="always")
    outer: OuterConfig = field(default_factory=OuterConfig, metadata=scope(unused_with=("mode", "data-parallel")))

What is declared of a table holds for all its options; an option's own declaration comes first. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal

Differs = Literal["never", "in a swarm", "always"]


@dataclass(frozen=True)
class Scope:
    """Says where an option may have another value. None: as its table says, and no if that says nothing."""

    may_change: bool | None = None
    """Whether it may be another when the run is resumed."""
    may_differ: Differs | None = None
    """Whether another worker of the same run may have another value."""
    unused_with: tuple[str, object] | None = None
    """The dotted key and the value with which this option has no effect."""

    def inside(self, table: "Scope") -> "Scope":
        """Complete this scope with that of the option's table."""
        return Scope(
            table.may_change if self.may_change is None else self.may_change,
            self.may_differ or table.may_differ,
            self.unused_with or table.unused_with,
        )


def scope(
    *,
    may_change: bool | None = None,
    may_differ: Differs | None = None,
    unused_with: tuple[str, object] | None = None,
) -> dict[str, Scope]:
    """Return the metadata of a dataclass field that says its scope."""
    return {"scope": Scope(may_change, may_differ, unused_with)}


def option(
    default: Any,
    *,
    may_change: bool | None = None,
    may_differ: Differs | None = None,
    unused_with: tuple[str, object] | None = None,
) -> Any:
    """Declare a dataclass field with a default and a scope."""
    metadata = scope(may_change=may_change, may_differ=may_differ, unused_with=unused_with)
    return field(default=default, metadata=metadata)


@cache
def scopes(kind: Any) -> Mapping[str, Scope]:
    """Return the scope of every option of a configuration class, by dotted key."""
    by_key: dict[str, Scope] = {}
    for declared in fields(kind):
        own: Scope = declared.metadata.get("scope", Scope())
        table: Any = declared.default_factory
        if table is not MISSING:
            by_key |= {f"{declared.name}.{key}": inner.inside(own) for key, inner in scopes(table).items()}
        else:
            by_key[declared.name] = own
    return by_key


def common_values(config: Any) -> dict[str, object]:
    """Return the values of a table that must be the same on all workers, by name."""
    kind: Any = type(config)
    same = [key for key, declared in scopes(kind).items() if declared.may_differ != "always"]
    return {key: getattr(config, key) for key in same}
