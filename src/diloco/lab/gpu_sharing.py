"""Several processes on one GPU: NVIDIA's Multi-Process Service, without which they take turns."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_MPS = "nvidia-cuda-mps-control"
_MPS_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_MPS_RUNNING = Path("/tmp/nvidia-mps/control")  # where NVIDIA's service listens unless it is told otherwise
_MPS_SECONDS = 60.0


@contextmanager
def shared_gpu(say: Callable[[str], None]) -> Iterator[None]:
    """Run NVIDIA's Multi-Process Service for the processes that are started here, and end it after them.

    Without it processes take turns on the GPU. One that runs already is used and left alone.
    """
    control = shutil.which(_MPS)
    if control is None:
        say(f"{_MPS} is not installed: the processes take turns on the GPU")
    if control is None or _MPS_FOLDERS[0] in os.environ or _MPS_RUNNING.exists():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="diloco-mps-") as folder:
        variables = dict.fromkeys(_MPS_FOLDERS, folder)
        started = subprocess.run([control, "-d"], env=os.environ | variables, timeout=_MPS_SECONDS, check=False)
        if started.returncode:
            say(f"{_MPS} -d failed ({started.returncode}): the processes take turns on the GPU")
            yield
            return
        os.environ.update(variables)  # for the processes that are started from here on
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit\n", timeout=_MPS_SECONDS, check=False)
            for name in _MPS_FOLDERS:
                del os.environ[name]
