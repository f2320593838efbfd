"""What a worker says of itself with every beat: where it is, and what `diloco status` shows of it."""

from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from diloco.engines.swarm.node.wire import Malformed, Message

_MAX_NUMBER = 1 << 20


@dataclass
class Status:
    number: int = -1
    """Its worker number; −1 before it has one."""
    holds: bool = False
    """It has the global state, and takes part in rounds."""
    next: int = 0
    """The round that it is in, or comes to next."""
    ended: int = -1
    """The last round that has ended for it."""
    position: int = 0
    """Inner steps, as a place in the schedule."""
    tokens: int = 0
    loss: float = -1.0
    step_seconds: float = 0.0
    contributed: int = -1
    """The last round that has its contribution in the mean."""
    label: str = ""
    """What its user calls the machine."""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, message: Message) -> "Status":
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.type is int:
                values[field.name] = message.number(field.name, -1, _MAX_NUMBER if field.name == "number" else 1 << 62)
            elif field.type is float:
                values[field.name] = message.real(field.name)
            elif field.type is bool:
                values[field.name] = message.flag(field.name)
            else:
                values[field.name] = message.text(field.name, 64)
        if not all(isfinite(value) for value in values.values() if isinstance(value, float)):
            raise Malformed("a status has a number that is not finite")
        return cls(**values)
