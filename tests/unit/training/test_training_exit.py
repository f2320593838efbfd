"""How a worker process ends: at once, with its exit code, and with nothing left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.training.processes.launcher import MODEL_CODE
from diloco.training.processes.start import _stop_on_signals

PROGRAM = """
import multiprocessing, sys, threading, time
from diloco.training.processes.launcher import exit_now

def worker():
    lock = multiprocessing.RLock()  # as tqdm makes one: in a spawned process it has a name in the system
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("done")
    exit_now(3)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=worker)
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_a_worker_process_ends_at_once_and_leaves_no_semaphore(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run([sys.executable, str(program)], check=True, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.stderr) == ("done\n3\n", "")


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hangup_ends_a_run_unless_it_is_ignored_as_with_nohup(ignored: bool) -> None:
    asked: list[bool] = []
    given = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with _stop_on_signals(lambda: asked.append(True)):
            os.kill(os.getpid(), signal.SIGHUP)
        assert asked == ([] if ignored else [True])
    finally:
        signal.signal(signal.SIGHUP, given)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no file that is always full")
def test_the_exit_code_says_why_a_worker_ended_though_its_log_is_on_a_full_disk(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from diloco.errors import ModelNotWritten\n"
        "from diloco.training.processes import launcher, swarm_worker\n"
        "def fail(*_): raise ModelNotWritten('no room')\n"
        "swarm_worker.train_swarm_worker = fail\n"
        "launcher.hold_as_worker = lambda folder: None\n"
        "class Slot: log = '/dev/full'; run_folder = None; parent = os.getppid()\n"
        "launcher.run_worker(None, Slot())\n"
    )
    ended = subprocess.run([sys.executable, str(program)], check=False, timeout=120)
    assert ended.returncode == MODEL_CODE
