"""`diloco doctor` beside a real node on the loopback device."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.main import run
from diloco.swarm import timing
from diloco.swarm.doctor import machine_checks, network_checks
from diloco.swarm.network.listening import ListenConfig
from diloco.swarm.network.p2pd.transport import P2pdTransport, protocol_of
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.node.audit import Audit
from diloco.swarm.node.node import Node
from diloco.swarm.run_files import invitation_file, write_private
from diloco.swarm.settings import Settings
from diloco.swarm.trainer import Snapshot
from diloco.swarm.trust.invitation import Invitation, invite
from diloco.swarm.trust.permissions import Permissions
from diloco.swarm.trust.run_key import RunKey

pytestmark = pytest.mark.timeout(600)
KEY = RunKey.create()


class Idle:
    """A trainer that does nothing."""

    def post_now(self, sequence: int) -> None: ...

    async def snapshot(self) -> Snapshot | None:
        return None

    def emit(self, type_: str, fields: Mapping[str, Any]) -> None: ...


async def _node(folder: Path, ready: "threading.Event", told: dict[str, Any]) -> None:
    invitation = invite(KEY, [], 3600, time.time())
    write_private(folder / invitation_file(), invitation.text())
    network = ListenConfig(host="127.0.0.1")
    transport = await P2pdTransport.create(folder / "worker-0.key", protocol_of(KEY.run_id), network)
    permissions = Permissions(KEY.public, transport.peer, invitation.credential(transport.peer), 3)
    node = Node(transport, permissions, Settings(str(folder), "worker-0", founder=True), Idle(), Audit)
    await node.start()
    told["invitation"] = invitation.with_addresses(await transport.addresses())
    told["end"], told["loop"] = asyncio.Event(), asyncio.get_running_loop()
    ready.set()
    await told["end"].wait()
    await node.leave()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures little, and waits long enough for a busy machine, whose clock check is then less exact."""
    monkeypatch.setattr(network_checks, "_MAX_PIECES", 4)
    monkeypatch.setattr(timing, "DOCTOR_SECONDS", 100.0)
    monkeypatch.setattr(network_checks, "_SOME_SKEW", 200.0)
    monkeypatch.setattr(network_checks, "_MOST_SKEW", 200.0)
    monkeypatch.setattr(timing, "DAEMON_ASK_SECONDS", 100.0)
    monkeypatch.setattr(timing, "DIAL_BACK_SECONDS", 50.0)


@pytest.fixture(scope="module")
def invitation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Invitation]:
    """To a swarm of one."""
    folder, ready, told = tmp_path_factory.mktemp("swarm"), threading.Event(), dict[str, Any]()
    thread = threading.Thread(target=lambda: asyncio.run(_node(folder, ready, told)))
    thread.start()
    assert ready.wait(100)
    yield told["invitation"]
    told["loop"].call_soon_threadsafe(told["end"].set)
    thread.join(100)


def doctor(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[int, list[str]]:
    """The exit code, and the lines, each with its remedy."""
    code = run(["doctor", *tokens, "--host", "127.0.0.1"])
    return code, " ".join(capsys.readouterr().out.replace("\n  ", " ").split(" ")).split("\n")


@pytest.mark.slow
def test_a_doctor_finds_the_swarm_its_clock_its_workers_and_how_fast_they_are(
    invitation: Invitation, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = doctor(capsys, invitation.text())
    found = {line.split()[1]: line for line in lines if line}
    assert code == 0, lines
    assert found["p2pd"].split()[-1] == "runs"
    assert KEY.run_id in found["invitation"]
    assert "answers" in found["address"]
    assert found["clock"].startswith("ok")
    assert "1 in the swarm" in found["workers"]
    assert "directly" in found["worker"] and "MB/s up" in found["worker"]
    assert found["reachable"].startswith("ok")  # the swarm can connect to its address
    assert found["relay"].startswith("warning")  # a machine without a public address does not relay


@pytest.mark.slow
def test_an_address_where_no_worker_answers_is_named_with_what_to_do(
    invitation: Invitation, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = invitation.peers[0]
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{peer}"
    code, lines = doctor(capsys, invitation.with_addresses([dead]).text())
    assert code == 1
    (line,) = [line for line in lines if line[8:].startswith("address ")]
    assert line.startswith("failed") and "/ip4/127.0.0.1/tcp/9" in line and "fresh invitation" in line
    code, lines = doctor(capsys, invitation.with_addresses([*invitation.addresses, dead]).text())
    assert code == 0  # another one does answer
    assert [line.split()[0] for line in lines if line[8:].startswith("address ")] == ["ok", "warning"]


@pytest.mark.slow
def test_an_invitation_of_another_run_an_expired_and_a_damaged_one_fail(
    invitation: Invitation, capsys: pytest.CaptureFixture[str]
) -> None:
    other = invite(RunKey.create(), invitation.addresses, 3600, time.time())
    expired = invite(KEY, invitation.addresses, 3600, time.time() - 7200)
    for text, said in [
        (other.text(), "takes no part in this run"),
        (expired.text(), "expired"),
        (invitation.text()[:-5], "copy it again"),
    ]:
        code, lines = doctor(capsys, text)
        assert code == 1
        assert any(line.startswith("failed") and said in line for line in lines), lines


@pytest.mark.slow
def test_a_revoked_invitation_is_named_as_the_cause_with_what_to_do(
    invitation: Invitation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise CallRefused("the invitation was revoked by the owner of the run", "revoked")

    monkeypatch.setattr(network_checks._SwarmChecks, "_hello", refuse)
    code, lines = doctor(capsys, invitation.text())
    (line,) = [line for line in lines if line[8:].startswith("address ")]
    assert code == 1 and line.startswith("failed")
    assert "answers, and does not let this machine in: revoked: the invitation was revoked" in line
    assert "ask the owner of the run for a new invitation" in line and "port open" not in line


def test_what_is_missing_or_too_little_fails_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_checks, "_version", lambda name: {"torch": "2.3.1", "hivemind": "1.1.11"}.get(name))
    found = {finding.name: finding for finding in machine_checks.check_packages()}
    assert {name: finding.state for name, finding in found.items()} == {
        "torch": "failed", "hivemind": "warning", "msgspec": "failed", "base58": "failed",
        "cryptography": "failed",
    }  # fmt: skip
    assert all(finding.remedy for finding in found.values())
    monkeypatch.setattr(machine_checks, "_version", lambda _: "of unknown version")
    torch = next(finding for finding in machine_checks.check_packages() if finding.name == "torch")
    assert (torch.state, torch.message) == ("warning", "is of unknown version")
    monkeypatch.setattr(machine_checks, "_TOO_LITTLE_DISK_BYTES", 1 << 62)
    assert machine_checks.check_disk(tmp_path / "not" / "there").state == "failed"
    monkeypatch.setattr(network_checks, "own_addresses", list)
    assert network_checks.check_addresses().state == "failed"
    assert network_checks.check_port(ListenConfig(host="192.0.2.77", port=4000)).state == "failed"
    assert network_checks.check_port(ListenConfig(announce=("example.org",))).state == "failed"


def test_missing_packages_are_reported_by_name() -> None:
    program = (
        "import sys; sys.modules['base58'] = sys.modules['msgspec'] = None; from diloco.cli.main import run; "
        "sys.exit(run(['doctor']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert sum(line.startswith("failed") for line in ended.stdout.splitlines()) == 2
    assert "disk" in ended.stdout and "2 of the checks failed" in ended.stderr
