"""The scope of options, declared beside them."""

from dataclasses import dataclass, field, replace

from diloco.core.config import SyncConfig
from diloco.core.options import Scope, common_values, option, scope, scopes


@dataclass(frozen=True)
class Table:
    plain: int = 1
    own: int = option(2, may_change=False, may_differ="never")


@dataclass(frozen=True)
class Whole:
    steps: int = option(3, may_change=True)
    table: Table = field(default_factory=Table, metadata=scope(may_change=True, unused_with=("mode", "x")))


def test_an_option_has_its_own_scope_first_and_then_its_tables() -> None:
    assert scopes(Whole) == {
        "steps": Scope(may_change=True),
        "table.plain": Scope(may_change=True, unused_with=("mode", "x")),
        "table.own": Scope(may_change=False, may_differ="never", unused_with=("mode", "x")),
    }
    assert Whole() == Whole(3, Table(1, 2))


def test_workers_need_not_offload_alike() -> None:
    config = SyncConfig()
    assert common_values(config) == common_values(replace(config, offload=True))
    assert common_values(config) != common_values(replace(config, codec="int8"))
