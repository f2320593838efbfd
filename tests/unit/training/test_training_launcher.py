"""Local workers: which ones start again, which do not, how the run is judged. The processes are made up."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from diloco.errors import ConfigError, WorkerFailed
from diloco.history.events import LossNotFiniteEvent, WorkerStartedEvent
from diloco.history.log import EventLog
from diloco.training.config.run import RunConfig
from diloco.training.processes import launcher
from diloco.training.processes.launcher import (
    CHECKPOINT_CODE,
    EXCLUDED_CODE,
    MAX_RESTARTS,
    EndTogether,
    LaunchedWorker,
    LocalWorkers,
    StartAgain,
)
from diloco.training.processes.local_process import LocalRank, SwarmSlot


class Process:
    """Ends at once with the next code of its worker; None: lives until it is told to stop."""

    pid = 1

    def __init__(self, code: int | None) -> None:
        self.exitcode = code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.exitcode = -9

    def join(self, seconds: float) -> None:
        del seconds


class Machine:
    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *codes: list[int | None], ranks: int | None = None
    ) -> None:
        """`codes`: of each worker, how its processes end, in order; of each rank, if `ranks` are one worker."""
        self.said: list[str] = []
        self.starts: list[int] = []
        (folder / "swarm").mkdir()
        sizes = (1,) * len(codes) if ranks is None else (ranks,)
        slots = [
            [SwarmSlot(i, sizes, folder, folder, None, 0, i == 0, rank) for rank in range(size)]
            for i, size in enumerate(sizes)
        ]
        for slot, *_ in slots:
            (folder / "swarm" / f"{slot.name}.json").write_text("{}")  # it has been in the swarm
        self.workers = LocalWorkers(RunConfig(engine="swarm", workers=len(sizes)), slots, StartAgain(self.said.append))
        monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.0)
        now = iter(range(10**9))
        monkeypatch.setattr(launcher.time, "monotonic", lambda: float(next(now)))

        def start(workers: Sequence[LaunchedWorker]) -> None:
            for worker in workers:
                assert isinstance(worker.local, SwarmSlot)
                self.starts.append(worker.local.index)
                of_processes = [codes[place] for place in ([worker.local.index] if ranks is None else range(ranks))]
                worker.begin([Process(code.pop(0)) for code in of_processes])  # type: ignore[misc]
                worker.started = 0.0

        monkeypatch.setattr(self.workers, "_start", start)

    def run(self, poll: Callable[[], None] = lambda: None) -> None:
        self.workers.run(poll)


def test_a_killed_worker_is_started_again_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, [0], [-signal.SIGKILL, 1, 0])
    machine.run()
    assert machine.starts == [0, 1, 1, 1]
    assert "local worker 1 ended" in machine.said[0] and "SIGKILL" in machine.said[0]
    assert "started again (2 of at most" in machine.said[1]


def test_a_worker_of_several_ranks_is_started_again_as_a_whole_when_one_of_them_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other rank does not end by itself, and is killed; the one that was killed first is named."""
    machine = Machine(tmp_path, monkeypatch, [None, 0], [-signal.SIGKILL, 0], ranks=2)
    killed: list[signal.Signals] = []

    def kill(worker: LaunchedWorker, number: signal.Signals) -> None:
        killed.append(number)
        for process in worker.processes:
            if process.is_alive():
                process.kill()

    monkeypatch.setattr(LaunchedWorker, "send_signal", kill)
    machine.run()
    assert machine.starts == [0, 0] and killed == [signal.SIGKILL]
    assert "rank 1 of local worker 0 ended" in machine.said[0]


def test_where_the_ranks_of_a_swarm_s_worker_have_met_is_not_left_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, [0], [0], ranks=2)
    (slot, _) = machine.workers.workers[0].locals
    assert isinstance(slot, SwarmSlot)
    slot.rendezvous.touch()
    machine.run()
    assert not slot.rendezvous.exists()


def test_the_reason_of_a_worker_of_several_ranks_is_that_of_the_rank_which_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank only says that it was left."""
    machine = Machine(tmp_path, monkeypatch, [EXCLUDED_CODE], [1], ranks=2)
    with pytest.raises(WorkerFailed):
        machine.run()
    assert machine.starts == [0]


def test_there_is_an_end_to_starting_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, [-signal.SIGSEGV] * 20)
    with pytest.raises(WorkerFailed, match="killed by SIGSEGV"):
        machine.run()
    assert len(machine.starts) == 1 + MAX_RESTARTS


@pytest.mark.parametrize("code", [2, CHECKPOINT_CODE, EXCLUDED_CODE])
def test_what_would_only_happen_again_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    machine = Machine(tmp_path, monkeypatch, [0], [code])
    machine.run()  # the other one has come to its end
    assert machine.starts == [0, 1] and "has ended for good" in machine.said[0]


def test_a_worker_that_was_never_in_the_swarm_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, [1])
    (tmp_path / "swarm" / "worker-0.json").unlink()
    with pytest.raises(WorkerFailed):
        machine.run()
    assert machine.starts == [0]


def test_a_bad_configuration_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, [2])
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "worker-0.log"
    monkeypatch.setattr(launcher, "rotate_log", lambda _: log.write_text("diloco.errors.ConfigError: no such thing"))
    with pytest.raises(ConfigError, match="no such thing"):
        machine.run()


@pytest.mark.parametrize(("code", "kind"), [(EXCLUDED_CODE, "Excluded"), (1, "RendezvousError")])
def test_what_the_others_answered_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: str
) -> None:
    machine = Machine(tmp_path, monkeypatch, [code])
    (tmp_path / "swarm" / "worker-0.json").unlink()
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "worker-0.log"
    text = f"Traceback (most recent call last):\n  File ...\ndiloco.errors.{kind}: it is so"
    monkeypatch.setattr(launcher, "rotate_log", lambda _: log.write_text(text))
    with pytest.raises(WorkerFailed, match=r"^local worker 0 has ended: it is so$") as caught:
        machine.run()
    assert not caught.value.output


def test_after_a_stop_nobody_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, [0], [-signal.SIGKILL, 0])
    monkeypatch.setattr(machine.workers, "_signal_stop", lambda: None)

    def stop() -> None:
        if machine.said and not machine.workers.stop_requests:
            machine.workers.stop()

    machine.run(stop)
    assert machine.starts == [0, 1]


def test_a_full_disk_is_told_once_and_the_worker_is_started_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = iter([True] * 40)
    monkeypatch.setattr(launcher, "disk_is_full", lambda _: next(full, False))
    machine = Machine(tmp_path, monkeypatch, [1, 0])
    machine.run()
    assert machine.starts == [0, 0] and len(machine.said) == 1
    assert "the disk of" in machine.said[0] and "is full" in machine.said[0] and "Make room" in machine.said[0]


def test_a_worker_whose_disk_is_full_says_so_though_it_could_write_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "run" / "logs" / "worker-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("")
    assert "it wrote nothing" in str(launcher.worker_error("worker 0", log, 1))
    monkeypatch.setattr(launcher, "free_disk", lambda _: 4096)
    assert "is full (4.1 kB free): make room, then continue with" in str(launcher.worker_error("worker 0", log, 1))


# A fixed set of workers


class FixedSet:
    """Three made-up workers of a fixed set, of which each poll is `seconds` after the one before."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *codes: int | None, seconds: float = 1.0) -> None:
        self.polls = 0
        config = RunConfig(workers=len(codes))
        ranks = [[LocalRank(n, config.ranks_of_workers(), folder, folder, 0)] for n in range(len(codes))]
        self.workers = LocalWorkers(config, ranks, EndTogether(config, folder))
        monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.0)
        monkeypatch.setattr(launcher.time, "monotonic", lambda: seconds * self.polls)
        self.processes = [Process(code) for code in codes]

        def start(workers: Sequence[LaunchedWorker]) -> None:
            for worker, process in zip(workers, self.processes, strict=True):
                worker.begin([process])  # type: ignore[list-item]

        monkeypatch.setattr(self.workers, "_start", start)

    def run(self) -> None:
        def poll() -> None:
            self.polls += 1

        self.workers.run(poll)


def test_a_fixed_set_of_workers_that_all_end_well_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FixedSet(tmp_path, monkeypatch, 0, 0, 0).run()


def test_of_a_fixed_set_the_killed_worker_is_told_for_the_others_failed_because_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkerFailed, match=r"^worker 1 of 3 failed: killed by SIGKILL$"):
        FixedSet(tmp_path, monkeypatch, 1, -signal.SIGKILL, 1).run()


def test_workers_that_had_not_found_each_other_are_killed_two_seconds_after_the_first_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = FixedSet(tmp_path, monkeypatch, 1, None, None)
    with pytest.raises(WorkerFailed, match="worker 0 of 3 failed: it wrote nothing; worker 1 did not end and was kil"):
        workers.run()
    assert workers.polls == 1 + 3 + 1, "the failure is seen at the first poll, and the deadline passes at the fourth"
    assert [process.exitcode for process in workers.processes] == [1, -9, -9]


def test_a_worker_that_was_killed_in_training_leaves_the_others_time_to_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = FixedSet(tmp_path, monkeypatch, -signal.SIGKILL, None, seconds=10.0)
    begin = EndTogether.begin

    def begun(policy: EndTogether) -> None:
        begin(policy)
        EventLog(tmp_path, 0).emit(WorkerStartedEvent())

    monkeypatch.setattr(EndTogether, "begin", begun)
    with pytest.raises(WorkerFailed, match="worker 0 of 2 failed: killed by SIGKILL; worker 1 did not end and was"):
        workers.run()
    timeout = RunConfig().sync.timeout_seconds
    assert 10.0 * (workers.polls - 3) <= 15.0 + timeout < 10.0 * (workers.polls - 2)


def test_a_loss_that_is_not_finite_asks_all_workers_of_a_fixed_set_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = FixedSet(tmp_path, monkeypatch, None, None)
    asked: list[tuple[str, int]] = []

    def end(worker: LaunchedWorker, number: signal.Signals) -> None:
        asked.append((str(worker.local), number))
        worker.processes[0].exitcode = 0  # type: ignore[misc]

    monkeypatch.setattr(LaunchedWorker, "send_signal", end)
    (tmp_path / "logs").mkdir()
    log = EventLog(tmp_path, 1)
    monkeypatch.setattr(EndTogether, "begin", lambda _: log.emit(LossNotFiniteEvent(step=3, loss="nan")))
    workers.run()
    assert asked == [("worker 0", signal.SIGINT), ("worker 1", signal.SIGINT)]
