"""join_swarm: what it keeps in its folder, and what it tells the engine. The engine itself has tests of its own."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import diloco
from diloco.errors import ConfigError
from diloco.run_lock import is_training
from diloco.swarm import engine as swarm_engine
from diloco.swarm.settings import Settings
from diloco.swarm.trust.invitation import Invitation, invite
from diloco.swarm.trust.run_key import RunKey

closing: list[Callable[[], None]] = []
"""What the engines call when they are closed."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    seen: list[Settings] = []
    closing.clear()

    def start(settings: Settings, *, on_event: object, on_close: Callable[[], None]) -> object:
        seen.append(settings)
        closing.append(on_close)
        return object()

    monkeypatch.setattr(swarm_engine, "SwarmEngine", start)
    return seen


def test_the_first_call_begins_a_swarm_and_the_next_goes_back_to_it(tmp_path: Path, started: list[Settings]) -> None:
    diloco.join_swarm(tmp_path)
    kept = Invitation.parse((tmp_path / "swarm" / "worker-0.invitation").read_text(), time.time())
    assert kept.run_id == RunKey.load(tmp_path / "swarm" / "run.key").run_id
    diloco.join_swarm(tmp_path)
    assert started[0] == started[1] and started[0].founder  # the same port, too
    assert Invitation.parse((tmp_path / "swarm" / "worker-0.invitation").read_text(), None) == kept


@pytest.mark.usefixtures("started")
def test_a_loop_of_ones_own_is_known_to_run_in_its_folder_until_it_closes_its_engine(tmp_path: Path) -> None:
    diloco.join_swarm(tmp_path, name="worker-0")
    diloco.join_swarm(tmp_path, name="worker-1")
    assert is_training(tmp_path)
    closing[0]()
    assert is_training(tmp_path)
    closing[1]()
    assert not is_training(tmp_path)


def test_with_an_invitation_another_worker_must_be_there(tmp_path: Path, started: list[Settings]) -> None:
    word = invite(RunKey.create(), [], 60.0, time.time()).text()
    diloco.join_swarm(tmp_path, word, name="worker-3", port=4001, host="127.0.0.1")
    assert not started[0].founder and not (tmp_path / "swarm" / "run.key").exists()
    assert (started[0].name, started[0].port, started[0].host) == ("worker-3", 4001, "127.0.0.1")


def test_a_folder_belongs_to_one_run(tmp_path: Path, started: list[Settings]) -> None:
    diloco.join_swarm(tmp_path)
    with pytest.raises(ConfigError, match="use another folder"):
        diloco.join_swarm(tmp_path, invite(RunKey.create(), [], 60.0, time.time()).text())
    assert len(started) == 1


def test_without_the_swarm_extra_it_says_what_to_install(tmp_path: Path) -> None:
    missing = "for name in ('msgspec', 'base58', 'cryptography', 'hivemind'): sys.modules[name] = None"
    program = f"import sys, diloco\n{missing}\ndiloco.join_swarm({str(tmp_path / 'run')!r})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "ConfigError: the swarm engine needs hivemind, msgspec, base58 and cryptography" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_an_own_loop_reads_its_invitation_from_a_file_or_the_environment(
    tmp_path: Path, started: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = RunKey.create()
    one, two = (invite(key, [], 60.0, time.time()) for _ in range(2))
    (tmp_path / "word.txt").write_text(one.text())
    diloco.join_swarm(tmp_path, f"@{tmp_path / 'word.txt'}")
    monkeypatch.setenv("DILOCO_INVITATION", two.text())
    diloco.join_swarm(tmp_path, name="worker-1")
    saved = [Invitation.parse((tmp_path / "swarm" / f"worker-{i}.invitation").read_text(), None) for i in range(2)]
    assert saved == [one, two] and not any(settings.founder for settings in started)


def test_each_worker_of_a_folder_has_an_invitation_of_its_own(tmp_path: Path, started: list[Settings]) -> None:
    diloco.join_swarm(tmp_path / "first")
    diloco.join_swarm(tmp_path / "first", name="worker-1")
    ids = {Invitation.parse(path.read_text(), None).id for path in (tmp_path / "first" / "swarm").glob("*.invitation")}
    assert len(ids) == 2
    diloco.join_swarm(tmp_path / "other", invite(RunKey.create(), [], 60.0, time.time()).text())
    with pytest.raises(ConfigError, match=r"worker-1 of .*other has no invitation, and each worker needs its own"):
        diloco.join_swarm(tmp_path / "other", name="worker-1")
    assert len(started) == 3
