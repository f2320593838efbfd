"""A trainer and its sidecar as two processes: messages, kills and freezes of either, and no process left behind.

The sidecars are real processes around a fake node (support/swarm/sidecars.py); the swarm itself is tested elsewhere.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.engines.rounds import GlobalState, RoundKey
from diloco.errors import ConfigError, EngineError, RoundFailed
from diloco.swarm import installed, timing
from diloco.swarm.engine import SwarmEngine
from diloco.swarm.installed import check_swarm
from diloco.swarm.settings import Settings
from diloco.swarm.sidecar import supervisor
from support.processes import context
from support.rounds import contribution, decoded, values
from support.swarm.sidecars import COMMAND, processes_with, told

pytestmark = pytest.mark.slow


def settings(folder: Path, **more: Any) -> Settings:
    (folder / "swarm").mkdir(parents=True, exist_ok=True)
    return Settings(str(folder / "swarm"), "worker-0", **{"timeout_seconds": 20.0, **more})


Events = list[tuple[str, dict[str, Any]]]


def made(folder: Path, events: Events | None = None, **more: Any) -> SwarmEngine:
    hear = None if events is None else (lambda type_, fields: events.append((type_, dict(fields))))
    return SwarmEngine(settings(folder, **more), on_event=hear, command=COMMAND)


def posted(engine: SwarmEngine, sequence: int, note: bytes = b"", seconds: float = 20.0, **more: Any) -> Any:
    return engine.start_round(RoundKey(sequence, 0), replace(contribution(engine, **more), note=note), seconds)


def eventually(claim: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def open_files() -> Counter[str]:
    """What this process has open, by kind."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found[str(Path(f"/proc/self/fd/{name}").readlink()).split(":")[0]] += 1
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SwarmEngine, Events, Path]]:
    """For what does no harm: starting a sidecar takes seconds."""
    events: Events = []
    folder = tmp_path_factory.mktemp("run")
    engine = made(folder, events)
    yield engine, events, folder
    engine.close()


def test_a_round_goes_through_the_sidecar_and_back(shared_engine: tuple[SwarmEngine, Events, Path]) -> None:
    engine, events, folder = shared_engine
    assert (engine.worker, engine.elastic, engine.sizes) == (7, True, (1,))
    assert ("member_joined", {"worker": 7}) in events
    pending = posted(engine, 3, b"mine")
    result = pending.wait()
    assert decoded(result) == values(7).tolist()
    assert (result.contributors, result.refused, result.total_weight) == ((7,), {3: "not finite"}, 2.0)
    assert (result.bytes_sent, result.bytes_received, result.seconds, result.roster) == (11, 12, 0.5, (3, 7))
    assert [(m.worker, m.anchor_digest, m.note) for m in result.members] == [(7, "same", b"mine")]
    assert engine.members() == result.members and engine.workers == 2
    assert pending.wait() is result
    assert posted(engine, 4, b"long").wait().members[0].note == b"long" * 100_000
    assert (folder / "logs" / "worker-0-swarm.log").exists()


def test_memory_is_used_again_by_the_next_round_and_not_by_one_beside_it(
    shared_engine: tuple[SwarmEngine, Events, Path],
) -> None:
    engine, _, _ = shared_engine
    posted(engine, 5).wait()
    before = open_files()["/memfd"]
    one, other = posted(engine, 6), posted(engine, 7)
    assert decoded(one.wait()) == decoded(other.wait()) == values(7).tolist()
    for sequence in range(8, 12):
        posted(engine, sequence).wait()
    assert open_files()["/memfd"] <= before + 4  # a pair more, for the round beside the other
    tiny = posted(engine, 12, numel=0).wait()
    assert tiny.mean.num_bytes == 0


def test_rounds_that_fail_say_why_and_whether_it_will_get_better(
    shared_engine: tuple[SwarmEngine, Events, Path],
) -> None:
    engine, _, _ = shared_engine
    pending = posted(engine, 20, b"fail")
    with pytest.raises(RoundFailed, match=r"^round 20: nobody else came$") as caught:
        pending.wait()
    assert caught.value.resync
    with pytest.raises(RoundFailed):
        pending.wait()
    with pytest.raises(EngineError, match="worker 7 is banned"):
        posted(engine, 21, b"ban").wait()
    with pytest.raises(RoundFailed, match="ZeroDivisionError"):
        posted(engine, 22, b"bug").wait()


def test_a_worker_that_is_called_knows_it_before_its_next_step(
    shared_engine: tuple[SwarmEngine, Events, Path],
) -> None:
    engine, _, _ = shared_engine
    assert not engine.wanted(31)
    posted(engine, 30, b"call").wait()
    assert engine.wanted(30) and engine.wanted(31) and not engine.wanted(32)


def test_a_state_arrives_as_tensors_with_means_and_position(shared_engine: tuple[SwarmEngine, Events, Path]) -> None:
    engine, _, _ = shared_engine
    assert engine.fetch_state() is None
    anchor = torch.randn(1000)
    state = GlobalState({"0.anchor": anchor}, {"sequence": 4, "merged": 4}, "layout", note=b"read up to here")
    engine.serve_state(lambda: state)
    got = engine.fetch_state()
    assert got is not None
    assert torch.equal(got.tensors["0.anchor"], anchor) and got.layout_digest == "layout"
    assert got.numbers == {"sequence": 6, "merged": 4, "same": 1}  # the round after the means; one snapshot for both
    assert [(key, bytes(mean.tolist())) for key, mean in got.means] == [
        (RoundKey(4, 0), b"abcd"),
        (RoundKey(5, 1), b"ef"),
    ]
    assert (got.position, got.note) == (60, b"read up to here")
    engine.settings.path("only means").touch()
    got = engine.fetch_state()
    engine.settings.path("only means").unlink()
    assert got is not None and not got.tensors  # the state is this worker's own; which means it has, it knows itself
    assert ([key for key, _ in got.means], got.numbers) == ([RoundKey(4, 0), RoundKey(5, 1)], {"sequence": 6})


def test_files_and_progress_reach_the_node_and_its_status_comes_back(
    shared_engine: tuple[SwarmEngine, Events, Path], tmp_path: Path
) -> None:
    engine, _, _ = shared_engine
    engine.serve_files({"config.toml": tmp_path / "config.toml"})
    engine.progress(inner_steps=12, tokens=345, loss=2.5, step_seconds=0.1)
    assert eventually(lambda: told(engine.settings).get("inner_steps") == 12)
    assert told(engine.settings)["files"] == {"config.toml": str(tmp_path / "config.toml")}
    assert [one.number for one in engine.status().members] == [3, 7, 8] and engine.workers == 2
    engine.fetch_file("tokenizer.json", tmp_path / "here")
    assert (tmp_path / "here").read_text() == "tokenizer.json"
    with pytest.raises(EngineError, match="nobody has the file missing"):
        engine.fetch_file("missing", tmp_path / "there")


def test_lost_and_frozen_sidecars_fail_their_rounds_and_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "RESTART_PAUSE_SECONDS", 0.1)
    before, threads = open_files(), set(threading.enumerate())
    lose_sidecars(tmp_path, monkeypatch)
    assert (tmp_path / "swarm" / "left").exists() and (tmp_path / "swarm" / "closed").exists()
    assert not processes_with(str(tmp_path))
    assert not open_files() - before
    assert not set(threading.enumerate()) - threads  # one of an earlier test may have ended meanwhile


def lose_sidecars(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: Events = []
    engine = made(folder, events)
    engine.serve_files({"a": folder / "a"})
    assert engine.fetch_state() is None
    engine.serve_state(lambda: GlobalState({}, {"sequence": 7}, "layout"))
    engine.next_round = lambda: 3  # it is not asked for the state: several ranks gather that after an inner step
    beside, killed = posted(engine, 0, b"sleep"), posted(engine, 1, b"die")
    for pending in (killed, beside):
        with pytest.raises(RoundFailed, match=r"the swarm's process was lost: it died \(signal 9\)") as caught:
            pending.wait()
        assert caught.value.resync
    with pytest.raises(RoundFailed, match="round 2: the swarm's process was lost") as caught:
        posted(engine, 2).wait()  # first it must know what it has missed
    assert caught.value.resync and engine.fetch_state() is not None  # waits for the next sidecar
    assert told(engine.settings)["next_round"] == 3
    assert posted(engine, 2).wait().total_weight == 2.0
    frozen = posted(engine, 3, b"freeze")
    with monkeypatch.context() as patch:
        patch.setattr(timing, "SIDECAR_SILENT_TURNS", 1)
        with pytest.raises(RoundFailed, match=r"it was silent for \d+ s, and was killed"):
            frozen.wait()
    assert engine.fetch_state() is not None
    with pytest.raises(RoundFailed, match="exit code 1"):  # p2pd died: a new process can help
        posted(engine, 4, b"lose").wait()
    assert engine.fetch_state() is not None
    assert eventually(lambda: told(engine.settings).get("files") == {"a": str(folder / "a")})
    lives = [type_ for type_, _ in events if type_.startswith("sidecar")]
    assert lives == ["sidecar_lost", "sidecar_restarted"] * 3
    engine.close()
    with pytest.raises(EngineError, match="is closed: no round can follow"):
        posted(engine, 5)
    engine.close()


def test_a_round_that_is_not_ended_in_time_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "DEADLINE_GRACE_SECONDS", 0.1)
    engine = made(tmp_path)
    sidecar = told(engine.settings)["pid"]
    with pytest.raises(RoundFailed, match="round 0: the swarm's process did not end it in time"):
        posted(engine, 0, b"sleep", seconds=0.1).wait()
    assert eventually(lambda: not Path(f"/proc/{sidecar}").exists())
    engine.close()  # while the next one is starting
    assert not processes_with(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "kind", "text"),
    [
        ("refuse", ConfigError, "^the invitation has expired: ask for a new one$"),
        ("crash", EngineError, "ZeroDivisionError"),
        ("sleep", EngineError, r"was not ready within .* see .*worker-0-swarm\.log"),
    ],
)
def test_a_swarm_that_cannot_be_joined_says_why_and_leaves_nothing(
    tmp_path: Path, file: str, kind: type[Exception], text: str
) -> None:
    before = open_files()
    (settings(tmp_path).path(file)).touch()
    with pytest.raises(kind, match=text):
        SwarmEngine(settings(tmp_path), command=COMMAND, start_seconds=1.0 if file == "sleep" else 20.0)
    assert not processes_with(str(tmp_path))
    assert not open_files() - before


def trainer(folder: str, tell: Connection, end: str) -> None:
    engine = SwarmEngine(Settings(folder, "worker-0"), command=COMMAND)
    tell.send(told(engine.settings)["pid"])
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    atexit._run_exitfuncs()  # as at the end of a program that did not close the engine


@pytest.mark.parametrize("end", ["killed", "forgot to close"])
def test_no_sidecar_outlives_its_trainer(tmp_path: Path, end: str) -> None:
    hear, tell = context.Pipe(duplex=False)
    process = context.Process(target=trainer, args=(settings(tmp_path).folder, tell, end))
    process.start()
    assert hear.poll(30.0)
    sidecar = hear.recv()
    process.join(20.0)
    assert eventually(lambda: not Path(f"/proc/{sidecar}").exists())
    assert (tmp_path / "swarm" / "left").exists() == (end == "forgot to close")


def test_without_its_packages_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installed, "PACKAGES", ("hivemind_is_missing",))
    with pytest.raises(ConfigError, match=r"needs hivemind_is_missing: .*pip install .*\.\[swarm\]"):
        SwarmEngine(Settings(str(tmp_path / "swarm"), "worker-0"))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Linux only"):
        check_swarm()


LOADED_TWICE = f"""
import runpy, sys
from collections import Counter
from diloco.swarm.sidecar import process

def run(fd, build):
    files = Counter(getattr(module, "__file__", None) for module in set(sys.modules.values()))
    print([file for file, times in files.items() if times > 1 and file and "diloco" in file])

process.run = run
sys.argv[1:] = ["3"]
runpy.run_module("{supervisor.COMMAND[-1]}", run_name="__main__", alter_sys=True)
"""


def test_the_sidecars_program_loads_no_module_twice() -> None:
    output = subprocess.run(
        [sys.executable, "-c", LOADED_TWICE], check=True, capture_output=True, text=True, timeout=120
    )
    assert output.stdout == "[]\n"
