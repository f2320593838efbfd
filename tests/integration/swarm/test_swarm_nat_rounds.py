"""Whole workers behind routers that let no connection in: they average through a public worker's relay."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines.reduction import reduce_parts
from diloco.swarm.run_files import invitation_file, write_private
from diloco.swarm.settings import Settings
from diloco.swarm.trust.invitation import invite
from diloco.swarm.trust.run_key import RunKey
from support.swarm import networks
from support.swarm.networks import Internet, internet

_MISSING = networks.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(_MISSING) and networks.REQUIRED not in os.environ, reason=_MISSING or ""),
]
NUMEL = 600_000
WORKER = Path(__file__).parents[2] / "support" / "swarm" / "averaging.py"


@contextmanager
def worker(
    net: Internet, where: str, folder: Path, key: RunKey, addresses: list[str], *, relayed: bool, **settings: Any
) -> Iterator["subprocess.Popen[str]"]:
    swarm = folder / where / "swarm"
    write_private(swarm / invitation_file(), invite(key, addresses, 3600.0, time.time()).text())
    given = asdict(Settings(str(swarm), "worker-0", patience=1000.0, lost_seconds=100.0, **settings))
    line = json.dumps({"settings": given, "workers": 3, "rounds": 2, "numel": NUMEL, "relayed": relayed})
    process = subprocess.Popen(
        net.inside(where, [sys.executable, str(WORKER), line]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(100)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def hear(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the worker has ended with {process.wait()}"
    return json.loads(line)


def reference_mean() -> bytes:
    from support.rounds import values

    vectors = []
    for number in range(3):
        vectors.append(EncodedVector(codec("int8"), PartLayout(NUMEL)))
        vectors[-1].encode(0, values(number, NUMEL))
    out = EncodedVector(codec("int8"), PartLayout(NUMEL))
    reduce_parts(codec("int8"), [v.data for v in vectors], [1.0] * 3, out.layout.part_elements, out.data)
    return out.data.numpy().tobytes()


def test_two_workers_behind_strict_routers_and_a_public_one_get_the_reference_mean(tmp_path: Path) -> None:
    import hashlib

    assert not _MISSING, f"{_MISSING}, and {networks.REQUIRED} is set"
    key = RunKey.create()
    with internet() as net:
        net.public("public")
        net.home("alice", symmetric=True)
        net.home("bob", symmetric=True)
        with worker(net, "public", tmp_path, key, [], relayed=False, founder=True, port=4000) as public:
            addresses = hear(public)["addresses"]
            with (
                worker(net, "alice", tmp_path, key, addresses, relayed=True) as alice,
                worker(net, "bob", tmp_path, key, addresses, relayed=True) as bob,
            ):
                for one in (alice, bob):
                    assert any("/p2p-circuit" in address for address in hear(one)["addresses"])
                rounds = [[hear(one) for one in (public, alice, bob)] for _ in range(2)]
    wanted = hashlib.sha256(reference_mean()).hexdigest()
    for results in rounds:
        assert [result["contributors"] for result in results] == [[0, 1, 2]] * 3
        assert {result["mean"] for result in results} == {wanted}
        assert all(result["sent"] > NUMEL for result in results)
