"""The method objects of an outer loop, for tests that look into one."""

from typing import TypeVar

from diloco.outer.loop import OuterLoop
from diloco.outer.method import Method

SomeMethod = TypeVar("SomeMethod", bound=Method)


def method_of(loop: OuterLoop, kind: type[SomeMethod]) -> SomeMethod | None:
    """The method of that class, if this run has it."""
    return next((method for method in loop.methods if isinstance(method, kind)), None)
