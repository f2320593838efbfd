"""Arguments of DiLoCo that do not fit each other: every row of the table refuses its example, and no other row does."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import SGD, Nesterov, OuterOptimizer
from diloco.core.rates import Course
from diloco.engines.base import Connection
from diloco.engines.local import LocalSwarm
from diloco.errors import ConfigError
from diloco.outer.arguments import REFUSED_ARGUMENTS, Arguments, RefusedArguments, refuse_arguments
from support.elastic import ElasticSwarm


@dataclass
class Ranked:
    """As much of a connection of a worker of two ranks as the table asks for."""

    elastic: bool = False
    workers: int = 2
    sizes: tuple[int, ...] = (2, 2)
    ranks: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(count=2))


def arguments(
    sync: SyncConfig | None = None, *, engine: Any = None, outer: OuterOptimizer | None = None, **more: Any
) -> Arguments:
    connection = LocalSwarm(2).engines()[0] if engine is None else engine
    return Arguments(sync or SyncConfig(), cast(Connection, connection), outer or Nesterov(), **more)


ASYNCHRONOUS = SyncConfig(asynchronous=True)
EXAMPLES: dict[tuple[str, str], tuple[Arguments, Arguments]] = {
    ("sync.merge", "engine"): (
        arguments(SyncConfig(merge="clipped")),
        arguments(SyncConfig(merge="clipped"), engine=LocalSwarm(4).engines()[0]),
    ),
    ("sync.asynchronous", "engine"): (
        arguments(ASYNCHRONOUS, engine=ElasticSwarm().engine(0)),
        arguments(ASYNCHRONOUS),
    ),
    ("sync.asynchronous", "outer"): (
        arguments(ASYNCHRONOUS, outer=SGD()),
        arguments(ASYNCHRONOUS, outer=Nesterov(0.5, 0.5)),
    ),
    ("sync.growth", "learning_rates"): (
        arguments(SyncConfig(growth=0.1)),
        arguments(SyncConfig(growth=0.1), has_learning_rates=True),
    ),
    ("learning_rates", "sync.growth"): (arguments(has_learning_rates=True), arguments()),
    ("sync.second_moment_every", "engine"): (
        arguments(SyncConfig(second_moment_every=2), engine=Ranked()),
        arguments(SyncConfig(second_moment_every=2)),
    ),
    ("sync.warm_start", "engine"): (
        arguments(SyncConfig(warm_start=5), engine=Ranked()),
        arguments(SyncConfig(warm_start=5)),
    ),
    ("sync.error_feedback", "ranks"): (
        arguments(SyncConfig(codec="topk"), engine=Ranked(elastic=True, sizes=(1,))),
        arguments(SyncConfig(codec="int4"), engine=Ranked(elastic=True, sizes=(1,))),
    ),
    ("sync.offload", "ranks"): (
        arguments(SyncConfig(offload=True), engine=Ranked(elastic=True, sizes=(1,))),
        arguments(SyncConfig(offload=True), engine=ElasticSwarm().engine(0)),
    ),
    ("sync.second_moment_every", "ranks"): (
        arguments(SyncConfig(second_moment_every=2), engine=Ranked(elastic=True, sizes=(1,))),
        arguments(SyncConfig(second_moment_every=2), engine=ElasticSwarm().engine(0)),
    ),
    ("restoring", "engine"): (arguments(engine=ElasticSwarm().engine(0), restoring=True), arguments(restoring=True)),
}
"""What a row refuses, and nearly the same, which is accepted."""


@pytest.mark.parametrize("row", REFUSED_ARGUMENTS, ids=lambda row: " with ".join(row.names))
def test_a_row_refuses_its_example_with_the_remedy_and_accepts_what_is_nearly_the_same(row: RefusedArguments) -> None:
    refused, accepted = EXAMPLES[row.names]
    assert [other.names for other in REFUSED_ARGUMENTS if other.applies(refused)] == [row.names]
    with pytest.raises(ConfigError) as refusal:
        refuse_arguments(refused)
    said = str(refusal.value)
    assert said == row.text(refused) and "{" not in said and len(said) > 60
    assert any(remedy in said for remedy in ("leave it out", "leave outer out", "give", "use", "train these"))
    refuse_arguments(accepted)


def test_a_course_is_no_outer_optimizer_for_asynchronous_workers_either() -> None:
    course = Nesterov(course=Course(2, start_momentum=0.1))
    with pytest.raises(ConfigError, match="with constant numbers"):
        refuse_arguments(replace(arguments(ASYNCHRONOUS), outer=course))
