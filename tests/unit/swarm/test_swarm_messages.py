"""Messages between peers: decoded strictly, within bounds; anything else is malformed."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.engines.header import HEADER_BYTES
from diloco.swarm.network.transport import MAX_CALL_BYTES
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.plan import MAX_NOTE_BYTES, Authority, Plan
from diloco.swarm.protocol.status import Status
from diloco.swarm.protocol.wire import Malformed, encode
from diloco.swarm.simulator.workers import plan


def beat(**changes: Any) -> dict[str, Any]:
    message = messages.Beat(Status(), ("/ip4/127.0.0.1/tcp/1",), ("abc",), "digest")
    fields: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return fields | changes


def changed_plan(change: Callable[[dict[str, Any]], None]) -> bytes:
    fields = msgspec.msgpack.decode(encode(plan([0, 1, 2])), strict=False)
    change(fields)
    return msgspec.msgpack.encode(fields)


def test_a_plan_survives_the_wire_with_its_decision() -> None:
    made = plan([0, 1, 2])
    read = messages.decode(encode(made))
    assert isinstance(read, Plan) and read == made and read.decision == made.decision


@pytest.mark.parametrize(
    "fields",
    [
        beat(t="NoSuchMessage"),
        beat(unknown=1),
        beat(status={"number": "0"}),
        beat(status={"number": 1 << 21}),
        beat(status={"loss": float("nan")}),
        beat(addresses=["x"] * 17),
        beat(addresses=["x" * 513]),
        beat(known=[b"bytes"]),
        beat(roster=[["name", b"credential", []]]),
        {"t": "Commit", "sequence": -1, "authority": [1, 0, 1]},
        {"t": "Commit", "sequence": 1, "authority": [1]},
        {"t": "Commit", "sequence": True, "authority": [1, 0, 1]},
        {"t": "StateHead", "numbers": {"inner_steps": 1}, "layout_digest": "", "note": b"", "size": 0},
        {"t": "StateHead", "numbers": {"sequence": 1.5}, "layout_digest": "", "note": b"", "size": 0},
        ["Beat"],
        "text",
    ],
)
def test_a_message_with_a_wrong_field_is_malformed(fields: Any) -> None:
    with pytest.raises(Malformed):
        messages.decode(msgspec.msgpack.encode(fields))


def _swap(fields: dict[str, Any]) -> None:
    fields["entries"][0], fields["entries"][1] = fields["entries"][1], fields["entries"][0]


def _repeat(fields: dict[str, Any]) -> None:
    fields["entries"].append(fields["entries"][0])


def _shorten_header(fields: dict[str, Any]) -> None:
    fields["entries"][0]["contribution"]["header"] = b"x" * (HEADER_BYTES - 1)


def _lengthen_note(fields: dict[str, Any]) -> None:
    fields["entries"][0]["contribution"]["note"] = b"x" * (MAX_NOTE_BYTES + 1)


def _rename_round(fields: dict[str, Any]) -> None:
    fields["key"]["sequence"] += 1


def _number_below_zero(fields: dict[str, Any]) -> None:
    fields["entries"][0]["contribution"]["worker"] = -1


@pytest.mark.parametrize("change", [_swap, _repeat, _shorten_header, _lengthen_note, _rename_round, _number_below_zero])
def test_a_plan_that_contradicts_itself_is_malformed(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(Malformed):
        messages.decode(changed_plan(change))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_malformed_and_nothing_worse(data: bytes) -> None:
    with pytest.raises(Malformed):
        messages.decode(data)


def test_a_message_above_the_limit_is_not_decoded() -> None:
    with pytest.raises(Malformed, match="more than"):
        messages.decode(bytes(MAX_CALL_BYTES + 1))


def test_the_version_of_a_hello_can_be_read_whatever_else_it_has() -> None:
    data = msgspec.msgpack.encode({"t": "hello", "protocol": 1, "version": "0.1", "seat": "worker-0"})
    version = messages.hello_version(data)
    assert version is not None and (version.protocol, version.version) == (1, "0.1")
    assert messages.hello_version(encode(messages.Inquire(0, Authority(1, 0)))) is None
