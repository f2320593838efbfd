"""The bytes of every message between peers, one example of each type: members of two versions must read each other.

A change of these bytes is a new `PROTOCOL`, unless peers of the version before still read and write the old form.
"""

import json
from pathlib import Path
from typing import get_args

import pytest
from msgspec import structs

from diloco.engines.rounds import Comparison, RoundKey
from diloco.swarm.audit.long_parts import sign_contribution
from diloco.swarm.node.transfer import pack_comparison
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.certificate import (
    Certificate,
    Notary,
    SignedRange,
    Vote,
)
from diloco.swarm.protocol.plan import Authority
from diloco.swarm.protocol.proofs import CertifiedPlan, LongParts, ShownPart, TwoPlans, TwoRanges
from diloco.swarm.protocol.status import MemberStatus, RunStatus, Status
from diloco.swarm.protocol.wire import PROTOCOL, PeerMessage, encode
from diloco.swarm.simulator.workers import NAMES, SEEDS, plan

GOLDEN = Path(__file__).parents[2] / "golden" / "swarm" / "messages.json"

_AUTHORITY = Authority(2, -1, 3)
_DIGEST = bytes(range(32))
_SIGNATURE = bytes(range(64))
_ADDRESSES = ("/ip4/127.0.0.1/tcp/4001/p2p/peer",)
_STATUS = Status(1, True, 7, 6, 5, 420, 1 << 33, 1 << 34, 2.5, 0.25, 5, "00000000000000000001-ab", "a machine")
_ROSTER = (messages.RosterEntry(NAMES[1], b"credential", _ADDRESSES, 1),)
_RANGE = SignedRange(_DIGEST, _SIGNATURE, b"cosines")
_OTHER_RANGE = SignedRange(_DIGEST[::-1], _SIGNATURE, b"cosines")
_VOTE = Vote(3, (_RANGE,), _SIGNATURE)
_CERTIFICATE = Certificate(3, (_RANGE,), {NAMES[0]: _SIGNATURE, NAMES[1]: _SIGNATURE})
_CREDENTIALS = {NAMES[0]: b"credential"}
_PLAN = structs.replace(
    plan([0, 1, 2], 6), authority=_AUTHORITY, majority=True, merge="clipped", shares=(4, 0, 2), rounds=(1, 2, 1),
    counted=(0, 1), last_ended=5, opposed=(2,),
)  # fmt: skip
_CONTRIBUTION = structs.replace(_PLAN.entries[1].contribution, note=b"note", root=_DIGEST)
_LIES = {
    "two ranges": TwoRanges(RoundKey(6, 0), _DIGEST, NAMES[1], _RANGE, _OTHER_RANGE),
    "long parts": LongParts(NAMES[1], _CONTRIBUTION, _SIGNATURE, (ShownPart(2, b"part", b"proof"),)),
    "two plans": TwoPlans(CertifiedPlan(_PLAN, _CERTIFICATE), CertifiedPlan(_PLAN, _CERTIFICATE), _CREDENTIALS),
}

EXAMPLES: dict[str, PeerMessage] = {
    "Hello": messages.Hello(
        PROTOCOL, "1.0", "joiner", b"credential", _ADDRESSES, _STATUS, _ROSTER, (b"revocation",),
        ((NAMES[2], b"credential"),),
    ),
    "Addressed": messages.Addressed("00000000000000000001-ab", "", b"request"),
    "Beat": messages.Beat(_STATUS, _ADDRESSES, ("aaaaaaaa",), "digest", b"8 bytes.", _ROSTER, (b"revocation",)),
    "AskNumber": messages.AskNumber(-1),
    "Number": messages.Number(4),
    "Goodbye": messages.Goodbye(),
    "Done": messages.Done(),
    "Ready": messages.Ready(_CONTRIBUTION, 4.0, "clipped"),
    "Waiting": messages.Waiting(),
    "Ended": messages.Ended(),
    "NotLeader": messages.NotLeader(),
    "Complete": messages.Complete(6, _AUTHORITY, _VOTE),
    "Trouble": messages.Trouble(6, _AUTHORITY, NAMES[2], "its parts do not come", True, "parts"),
    "Opposed": messages.Opposed(6, _AUTHORITY, 3, (_RANGE,)),
    "Plan": _PLAN,
    "Commit": messages.Commit(6, _AUTHORITY, _DIGEST, _CERTIFICATE),
    "Inquire": messages.Inquire(6, _AUTHORITY),
    "Posted": messages.Posted(_CONTRIBUTION, 4.0, "mean", messages.Voted(_PLAN, _VOTE), _AUTHORITY),
    "LedBy": messages.LedBy(NAMES[0]),
    "NotPosted": messages.NotPosted(),
    "Superseded": messages.Superseded(_AUTHORITY),
    "PostNow": messages.PostNow(6),
    "AskOutcome": messages.AskOutcome(6),
    "AskLastPlan": messages.AskLastPlan(),
    "Outcome": messages.Outcome(_PLAN, _CERTIFICATE, _CREDENTIALS),
    "AskEnds": messages.AskEnds(2),
    "Ends": messages.Ends(bytes(range(16))),
    "RoundsLost": messages.RoundsLost(3, 4096),
    "AskStatus": messages.AskStatus(),
    "StatusAnswer": messages.StatusAnswer(
        RunStatus(
            "run", (MemberStatus(**structs.asdict(_STATUS), peer=NAMES[1], silent_seconds=0.5, addresses=_ADDRESSES),),
            NAMES[0], {"6": "gathering"}, {NAMES[2]: "it lied"},
        )
    ),
    "AskFiles": messages.AskFiles(),
    "FileNames": messages.FileNames(("config.toml",)),
    "AskTime": messages.AskTime(),
    "Time": messages.Time(1.8e9),
    "Measure": messages.Measure(5, b"padding"),
    "Measured": messages.Measured(b"bytes"),
    "Proof": messages.Proof(_LIES["two ranges"]),  # type: ignore[arg-type]
    "Proof of long parts": messages.Proof(_LIES["long parts"]),  # type: ignore[arg-type]
    "Proof of two plans": messages.Proof(_LIES["two plans"]),  # type: ignore[arg-type]
    "Projections": messages.Projections(_DIGEST, 4, bytes(8)),
    "AskPart": messages.AskPart(_DIGEST, 4),
    "Part": messages.Part(b"part", b"proof"),
    "AskStateDigest": messages.AskStateDigest(7),
    "StateDigest": messages.StateDigest(_DIGEST, True),
    "OpenParts": messages.OpenParts(6, _AUTHORITY),
    "OpenMean": messages.OpenMean(6),
    "OpenState": messages.OpenState(),
    "StateHead": messages.StateHead({"sequence": 7, "inner_steps": 420}, "layout", b"", 1 << 30, _DIGEST),
    "OpenFile": messages.OpenFile("tokenizer.json"),
    "FileHead": messages.FileHead(1 << 20, _DIGEST.hex()),
    "NotHere": messages.NotHere(),
}  # fmt: skip


def test_every_message_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES.values()} == set(get_args(messages.Message))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_has_the_bytes_that_it_has_always_had(name: str, regenerate_golden: bool) -> None:
    data = encode(EXAMPLES[name])
    assert messages.decode(data) == EXAMPLES[name]
    _compare_with_golden(name, data, regenerate_golden)


_NOTARY = Notary("run", NAMES[0], SEEDS[NAMES[0]])
BESIDES = {
    "a plan's digest": _PLAN.digest,
    "the digest of a vote's mean": _VOTE.mean,
    "a comparison": pack_comparison(Comparison((1.0, 2.0, 3.0), (0, 1), 4)),
    "a signed vote": _NOTARY.vote(_PLAN, 3, (_RANGE,)).signature,
    "a signed range": _NOTARY.sign_range(_PLAN, _DIGEST, b"cosines").signature,
    "a signed contribution": sign_contribution(_NOTARY, RoundKey(6, 0), _CONTRIBUTION),
}
"""What is signed, and what travels outside of messages: a comparison follows the mean of a range on its stream."""


@pytest.mark.parametrize("name", BESIDES)
def test_what_is_signed_and_sent_besides_has_the_same_bytes(name: str, regenerate_golden: bool) -> None:
    _compare_with_golden(name, BESIDES[name], regenerate_golden)


def test_the_golden_file_has_no_message_that_is_gone() -> None:
    assert set(json.loads(GOLDEN.read_text())) == {*EXAMPLES, *BESIDES}


def _compare_with_golden(name: str, data: bytes, regenerate: bool) -> None:
    if regenerate:
        kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        GOLDEN.write_text(json.dumps({**kept, name: data.hex()}, indent=1) + "\n")
    assert data.hex() == json.loads(GOLDEN.read_text())[name]
