"""Workers of one machine share its cores out, also among separate commands, and whatever dies counts no longer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.history.events import Event, ThreadsEvent, event_fields
from diloco.training.processes import cores
from diloco.training.processes.cores import SharedCores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cores", lambda: 8)
    monkeypatch.setattr(cores, "_COUNT_SECONDS", 0.0)


class Worker:
    def __init__(self, folder: Path, *, local: int = 1, fixed: int | None = None) -> None:
        self.threads: list[int] = []
        self.told: list[dict[str, object]] = []
        self.share = SharedCores(self.threads.append, self._tell, fixed=fixed, folder=folder / "registry")
        self.share.begin(local)

    def _tell(self, event: Event) -> None:
        assert isinstance(event, ThreadsEvent)
        self.told.append(event_fields(event))


def test_a_second_worker_takes_half_and_the_first_one_gives_it_up(tmp_path: Path) -> None:
    first = Worker(tmp_path)
    assert first.threads == [8] and first.told == [{"threads": 8, "cores": 8, "workers": 1}]
    second = Worker(tmp_path)
    assert second.threads == [4]
    first.share.update()
    assert first.threads == [8, 4] and first.told[-1] == {"threads": 4, "cores": 8, "workers": 2}
    first.share.update()
    assert first.threads == [8, 4]  # nothing has changed
    second.share.close()
    first.share.update()
    assert first.threads == [8, 4, 8]


def test_more_workers_than_cores_have_one_thread_each(tmp_path: Path) -> None:
    workers = [Worker(tmp_path) for _ in range(9)]
    assert workers[-1].threads == [1]


def test_local_workers_that_start_together_count_before_they_are_there(tmp_path: Path) -> None:
    assert Worker(tmp_path, local=4).threads == [2]


def test_what_the_user_has_chosen_comes_first_and_takes_nothing_from_the_others(tmp_path: Path) -> None:
    chosen, other = Worker(tmp_path, fixed=3), Worker(tmp_path)
    chosen.share.update()
    assert chosen.threads == [3] and chosen.told == [] and other.threads == [8]


def test_a_killed_worker_counts_no_longer_and_its_file_goes(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from diloco.training.processes.cores import SharedCores\n"
        "SharedCores(print, lambda *_, **__: None, fixed=None, folder=pathlib.Path(sys.argv[1])).begin(1)\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    folder = tmp_path / "registry"
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and "ready" in iter(line.strip() for line in other.stdout)
            first = Worker(tmp_path)
            assert first.threads == [4]
        finally:
            os.kill(other.pid, signal.SIGKILL)
    first.share.update()
    assert first.threads == [4, 8]
    assert len(list(folder.iterdir())) == 1


def test_a_registry_that_cannot_be_used_shares_among_the_local_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "registry").write_text("not a folder")
    assert Worker(tmp_path, local=2).threads == [4]
    assert "workers of other runs are not counted" in caplog.text
