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
from diloco.outer.arguments import REFUSED_ARGUMENTS, Given, RefusedArguments, refuse_arguments
from support.elastic import ElasticSwarm


@dataclass
class Ranked:
    """As much of a connection of a worker of two ranks as the table asks for."""

    elastic: bool = False
    workers: int = 2
    sizes: tuple[int, ...] = (2, 2)
    ranks: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(count=2))


def given(
    sync: SyncConfig | None = None, *, engine: Any = None, outer: OuterOptimizer | None = None, **more: Any
) -> Given:
    connection = LocalSwarm(2).engines()[0] if engine is None else engine
    return Given(sync or SyncConfig(), cast(Connection, connection), outer or Nesterov(), **more)


ASYNCHRONOUS = SyncConfig(asynchronous=True)
EXAMPLES: dict[tuple[str, str], tuple[Given, Given]] = {
    ("sync.merge", "engine"): (
        given(SyncConfig(merge="clipped")),
        given(SyncConfig(merge="clipped"), engine=LocalSwarm(4).engines()[0]),
    ),
    ("sync.asynchronous", "engine"): (given(ASYNCHRONOUS, engine=ElasticSwarm().engine(0)), given(ASYNCHRONOUS)),
    ("sync.asynchronous", "outer"): (given(ASYNCHRONOUS, outer=SGD()), given(ASYNCHRONOUS, outer=Nesterov(0.5, 0.5))),
    ("sync.growth", "learning_rates"): (
        given(SyncConfig(growth=0.1)),
        given(SyncConfig(growth=0.1), has_learning_rates=True),
    ),
    ("learning_rates", "sync.growth"): (given(has_learning_rates=True), given()),
    ("sync.second_moment_every", "engine"): (
        given(SyncConfig(second_moment_every=2), engine=Ranked()),
        given(SyncConfig(second_moment_every=2)),
    ),
    ("sync.warm_start", "engine"): (given(SyncConfig(warm_start=5), engine=Ranked()), given(SyncConfig(warm_start=5))),
    ("ranks", "engine"): (given(engine=Ranked(elastic=True, sizes=(1,))), given(engine=ElasticSwarm().engine(0))),
    ("restoring", "engine"): (given(engine=ElasticSwarm().engine(0), restoring=True), given(restoring=True)),
}
"""What a row refuses, and nearly the same, which is accepted."""


@pytest.mark.parametrize("row", REFUSED_ARGUMENTS, ids=lambda row: " with ".join(row.names))
def test_a_row_refuses_its_example_with_the_remedy_and_accepts_what_is_nearly_the_same(row: RefusedArguments) -> None:
    refused, accepted = EXAMPLES[row.names]
    assert [other.names for other in REFUSED_ARGUMENTS if other.applies(refused)] == [row.names]
    with pytest.raises(ConfigError) as refusal:
        refuse_arguments(refused)
    said = str(refusal.value)
    assert said == row.message.format(given=refused) and "{" not in said and len(said) > 60
    assert any(remedy in said for remedy in ("leave it out", "leave outer out", "give", "use", "train these"))
    refuse_arguments(accepted)


def test_a_course_is_no_outer_optimizer_for_asynchronous_workers_either() -> None:
    course = Nesterov(course=Course(2, start_momentum=0.1))
    with pytest.raises(ConfigError, match="with constant numbers"):
        refuse_arguments(replace(given(ASYNCHRONOUS), outer=course))
