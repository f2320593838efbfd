"""Bytes that come from a peer, a checkpoint, an event log or an invitation.

Whatever they are, a parser raises nothing but the exceptions that it names, ends soon, and takes little memory.

Each parser gets random bytes, and good input with some bytes changed, cut out or repeated. The examples are the same in
every run. The codecs have such a test in test_codecs.py, the note beside a contribution in test_note.py.
"""

import contextlib
import hashlib
import json
import math
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from diloco.bucket import records
from diloco.dashboard.runs import QuickLines, Run
from diloco.data.preparation.received_corpus import receive_metadata
from diloco.engines.anchor_sockets import _REPLY, _read_reply
from diloco.engines.header import pack
from diloco.engines.note import MalformedNote, Note, read_note, write_note
from diloco.engines.rounds import Contribution, RoundKey
from diloco.errors import CheckpointError, ConfigError, DataError, EngineError
from diloco.history.log import EventReader
from diloco.history.run_history import read_history
from diloco.swarm.audit import merkle
from diloco.swarm.audit.witnesses import state_digest
from diloco.swarm.network.known_peers import read_peers
from diloco.swarm.network.multiaddr import ip_of, is_public, split_peer, to_bytes, to_text
from diloco.swarm.network.p2pd.reachability import decode_dial_back
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.node.transfer import comparison_bytes, unpack_comparison
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.plan import Entry, parse_header
from diloco.swarm.protocol.status import Status
from diloco.swarm.protocol.wire import Malformed, encode
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.sidecar import snapshots
from diloco.swarm.simulator.workers import NAMES, plan
from diloco.swarm.trainer import PresentWorker, Snapshot
from diloco.swarm.trust.credential import Credential, PeerRefused
from diloco.swarm.trust.invitation import MARK, Invitation, encode_text, invite
from diloco.swarm.trust.run_key import Revocation, RevocationClaims, RunKey
from diloco.training.checkpoints.manifests import Manifest
from diloco.training.checkpoints.tensor_files import saved_tensors
from diloco.training.records.run_description import RunDescription
from support.bucket import plan_of, post_of

KEY = RunKey(bytes(range(32)))
ADDRESS = f"/ip4/192.0.2.1/tcp/4000/p2p/{NAMES[0]}"
INVITATION = invite(KEY, [ADDRESS], 3600.0, 1e9)
REVOCATION = Revocation.create(KEY.seed, KEY.public, RevocationClaims(frozenset({NAMES[0]}), None, 1))
HEADER = pack(RoundKey(3, 0), Contribution(None, 1.0, 1.0, "anchor", "layout"))  # type: ignore[arg-type]
NESTED = b"[" * 3000 + b"]" * 3000
STATE = save({"0.anchor": torch.arange(8.0)})
_SECONDS, _BYTES = 5.0, 32 << 20
EVENT = {"v": 1, "time": 1.0, "worker": 0, "type": "step", "step": 3, "loss": 1.5}


def as_file(read: Callable[[Path], object], name: str = "file") -> Callable[[bytes], object]:
    """A parser of a file, which is written into an empty folder first."""

    def parse(data: bytes) -> object:
        folder = SCRATCH / "hostile"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        return read(folder if name == "events.jsonl" or name.endswith(".safetensors") else folder / name)

    return parse


SCRATCH = Path()


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path) -> None:
    global SCRATCH
    SCRATCH = tmp_path


def read_plan(data: bytes) -> None:
    """A plan, and all that a worker computes from it before it agrees."""
    made = messages.decode(data)
    if isinstance(made, type(PLAN)):
        assert made.offences() is not None and made.liars is not None and made.ranges(4) is not None
        if made.has_mean:
            assert made.longest is not None


def read_state(data: bytes) -> None:
    memory = SharedMemory.copy_of(data or b"\0")
    state_digest(Snapshot(memory, {"sequence": 0}, "layout", b""))
    snapshots.read(memory)


def read_address(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    ip_of(text)
    is_public(text)
    split_peer(text)
    to_bytes(text)


def read_socket(read: Callable[[socket.socket], object]) -> Callable[[bytes], object]:
    """What the server of asynchronous workers and its workers send each other."""

    def parse(data: bytes) -> object:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            mine.settimeout(2.0)
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            return read(mine)

    return parse


def read_metadata(data: bytes) -> None:
    """The files of a corpus that a member sends: meta.json, tokenizer.json."""
    receive_metadata(SCRATCH / "corpus", "0" * 64, lambda _, path: path.write_bytes(data))


def read_page(folder: Path) -> None:
    """What the page makes of a log."""
    run = Run(folder, "run")
    run.state()
    run.series(None, 100, None)
    run.rounds(None, 5)


def read_quickly(path: Path) -> object:
    return EventReader(path, QuickLines).read()


def read_post(data: bytes) -> None:
    post = records.decode(data, records.Post)
    assert post.member is not None and post.data_name.startswith(("rounds/", "ends/"))


def read_round_plan(data: bytes) -> None:
    """The plan of a round in a bucket, and all that a worker computes from it before it reads contributions."""
    made = records.decode(data, records.RoundPlan)
    assert made.has_mean == bool(made.ranges()) or made.encoding.num_parts == 0
    if made.posts:
        assert not made.without(made.posts[0].worker).has_mean or len(made.posts) > 1


def read_record(kind: type[records.Record]) -> Callable[[bytes], object]:
    return lambda data: records.decode(data, kind)


BEAT = records.WorkerBeat(Status(number=2, has_state=True), 40.0, 3)
STATE_RECORD = records.StateRecord({"sequence": 3}, "layout", b"", "tensors-" + 16 * "0", 5, bytes(32))
MEAN = records.join_mean(records.MeanRange(1, (1.0, 0.0, 3.0), hashlib.sha256(b"mean").digest()), b"mean")
PLAN = plan([0, 1, 2])
ENTRY = PresentWorker(0, HEADER, write_note(Note({1: (0, 3)})))
MESSAGES = [
    messages.Hello(8, "1", "worker", INVITATION.credential(NAMES[0]).data(), (), Status()),
    messages.Beat(Status(number=2), ("/ip4/192.0.2.1/tcp/1",), ("abcdefgh",), "0" * 16),
    messages.Ready(ENTRY, 3.0),
    messages.Posted(ENTRY),
    messages.StateHead({"sequence": 3}, "layout", write_note(Note()), 5, bytes(32)),
]
TYPES = [
    "round",
    "members",
    "validation",
    "member_joined",
    "resumed",
    "worker_started",
    "step",
    "checkpoint",
    "renumbered",
]
LINES = [
    json.dumps(EVENT | {"type": type_, "members": [{"worker": 1, "report": {}}], "present": [{"member": 2}]}).encode()
    + b"\n"
    for type_ in TYPES
]
DEEP = (b"\x81\xa1x" + b"\x91" * 5000 + b"\xc0", b"\x82\xa1t\xa5hello\xa1x" + b"\x91" * 5000 + b"\xc0")
"""Nested 5,000 times."""
MANIFEST = json.dumps({"format": 1, "sha256": "0" * 64, "body": {"files": {}, "moment": {}}}).encode()


@dataclass(frozen=True)
class Parser:
    parse: Callable[[bytes], object]
    good: tuple[bytes, ...]
    raises: tuple[type[Exception], ...]
    """All that it may raise; nothing if it is empty."""


RECORD = (records.Malformed,)
PARSERS = {
    "message": Parser(messages.decode, (*map(encode, MESSAGES), *DEEP), (Malformed,)),
    "plan": Parser(read_plan, (encode(PLAN),), (Malformed,)),
    "version": Parser(messages.hello_version, (encode(MESSAGES[0]), *DEEP), ()),
    "refusal": Parser(lambda data: CallRefused.read(data.decode("utf-8", "replace")), (b"busy: later",), ()),
    "header": Parser(lambda data: parse_header(0, data), (HEADER,), (Malformed,)),
    "entry": Parser(lambda data: Entry("a", PresentWorker(1, data, data)).fault, (HEADER,), (Malformed,)),
    "note": Parser(read_note, (write_note(Note({1: (2, 3)}, frozenset({4}))),), (MalformedNote,)),
    "comparison": Parser(lambda data: unpack_comparison(data, 3, 5), (bytes(comparison_bytes(3)),), (Malformed,)),
    "proof": Parser(lambda data: merkle.root_from([bytes(32)], range(2, 3), 7, data), (bytes(96),), (Malformed,)),
    "state": Parser(read_state, (STATE,), (Malformed, EngineError)),
    "credential": Parser(Credential.read, (INVITATION.credential(NAMES[0]).data(),), (PeerRefused,)),
    "revocation": Parser(lambda data: Revocation.read(data, KEY.public), (REVOCATION.data,), (PeerRefused,)),
    "invitation": Parser(
        lambda data: Invitation.parse(data.decode("utf-8", "replace"), None),
        (INVITATION.text().encode(), NESTED),
        (ConfigError,),
    ),
    "content of an invitation": Parser(
        lambda data: Invitation.parse(MARK + encode_text(data[:2000]), None),
        (msgspec.msgpack.encode(INVITATION), *DEEP),
        (ConfigError,),
    ),
    "dial back": Parser(decode_dial_back, (b'{"ip":"192.0.2.1","reached":true}', NESTED), ()),
    "address": Parser(to_text, (to_bytes(ADDRESS),), (ConfigError,)),
    "address as text": Parser(read_address, (ADDRESS.encode(),), (ConfigError,)),
    "peers.json": Parser(
        as_file(read_peers),
        (msgspec.json.encode({"version": 1, "peers": [{"peer": "a", "worker": 1, "addresses": ["b"]}]}), NESTED),
        (),
    ),
    "events": Parser(
        as_file(read_history, "events.jsonl"),
        (
            json.dumps(EVENT).encode() + b"\n",
            NESTED + b"\n",
            b'[1]\n"a"\n3\n{}\nnull\n{"type": 3}\n{"type": "renumbered"}\n{"type": "resumed", "worker": 0}\n',
            b'{"v":1,"time":1,"worker":0,"type":"step","step":' + b"9" * 5000 + b"}\n",
            b'{"v":1,"time":1,"worker":0,"type":"round","refused":{"' + b"9" * 5000 + b'":"a"}}\n'
            b'{"v":1,"time":1,"worker":2,"type":"renumbered","before":0,"peer":"a"}\n',
        ),
        (),
    ),
    "tail of events": Parser(
        as_file(read_quickly, "events.jsonl"), (json.dumps(EVENT).encode() + b"\n", NESTED + b"\n[1]\n3\n{}\n"), ()
    ),
    "page's record": Parser(as_file(read_page, "events.jsonl"), tuple(LINES), ()),
    "reply": Parser(
        read_socket(_read_reply), (_REPLY.pack(0, 1, 2, 4) + b"no" + bytes(4),), (ConnectionError, EngineError)
    ),
    "corpus": Parser(read_metadata, (b'{"version": 4}', b"[]", NESTED), (DataError,)),
    "manifest": Parser(as_file(Manifest.read), (MANIFEST, NESTED, b"[]", b'{"format": 1}'), (ValueError,)),
    "tensors": Parser(as_file(saved_tensors, "rank0.safetensors"), (STATE,), (CheckpointError,)),
    "claim of a number": Parser(
        read_record(records.MemberClaim), (records.encode(records.MemberClaim("0" * 16, "here")), *DEEP), RECORD
    ),
    "beat": Parser(read_record(records.WorkerBeat), (records.encode(BEAT), *DEEP), RECORD),
    "post": Parser(read_post, (records.encode(post_of(1, RoundKey(3, 0))), *DEEP), RECORD),
    "round's plan": Parser(read_round_plan, (records.encode(plan_of(RoundKey(3, 0), (0, 1, 5))), *DEEP), RECORD),
    "record of a state": Parser(read_record(records.StateRecord), (records.encode(STATE_RECORD), *DEEP), RECORD),
    "range of a mean": Parser(lambda data: records.split_mean(data, 4), (MEAN,), RECORD),
    "description": Parser(as_file(RunDescription.read), (b'{"version": "1", "model": []}', NESTED), (ConfigError,)),
}


def changed(good: bytes, seed: int) -> bytes:
    """Some bytes of it changed, cut out, repeated or put in; or other bytes altogether."""
    random, data = Random(seed), bytearray(good)
    if seed % 8 == 0:
        return random.randbytes(random.randrange(400))
    for _ in range(random.randrange(1, 5)):
        place = random.randrange(len(data) + 1)
        length = random.choice([1, 1, 2, 8, 40])
        match random.randrange(5):
            case 0:
                data[place : place + 1] = random.randbytes(1)
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = data[place : place + length] * random.choice([1, 3, 50])
            case 3:
                data[place:place] = random.choice(
                    [b"\xff" * 8, b"9" * length, b"\0" * length, b"{[", b'"', b"\xdf\x7f"]
                )
            case 4:
                special = random.choice([math.nan, math.inf, -math.inf, 1e300, -1.0, 5e-324])
                data[place : place + 8] = struct.pack("<d", special)
    return bytes(data)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 40))
def test_hostile_bytes_raise_only_what_the_parser_names_and_take_little(name: str, seed: int) -> None:
    parser = PARSERS[name]
    data = changed(parser.good[seed % len(parser.good)], seed // 8)
    check(parser, data)


@pytest.mark.parametrize("name", PARSERS)
def test_good_and_extreme_bytes_raise_only_what_the_parser_names(name: str) -> None:
    parser = PARSERS[name]
    for data in (*parser.good, b"", b"\0" * 3000, b"\xff" * 3000, NESTED, b"9" * 6000, b"{" * 6000, b'{"a":' * 2000):
        tracemalloc.start()
        check(parser, data)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < _BYTES


def check(parser: Parser, data: bytes) -> None:
    started = time.process_time()
    with contextlib.suppress(*parser.raises):
        parser.parse(data)
    assert time.process_time() - started < _SECONDS
