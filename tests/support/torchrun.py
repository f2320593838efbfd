"""Scripts in the environment that torchrun gives its ranks, as forks (support/forks.py) and without its agent."""

import os
import runpy
import sys
import warnings
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from support.forks import Fork


class Torchrun:
    """`script` as so many ranks of one machine. Their output and errors are in one file; warnings are errors."""

    def __init__(self, script: Path, count: int, folder: Path) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._output = folder / "output.txt"
        self._ranks = [
            Fork(
                _run_script,
                script,
                folder,
                environment={**os.environ, **self._environment(rank, count)},
                output=self._output,
                errors=self._output,
            )
            for rank in range(count)
        ]

    def _environment(self, rank: int, count: int) -> dict[str, str]:
        return {
            **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
            **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
        }

    def wait(self, seconds: float = 400.0) -> str:
        """The output, once all have ended well."""
        codes = [rank.wait(seconds) for rank in self._ranks]
        assert codes == [0] * len(codes), self._output.read_text()
        return self._output.read_text()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def _run_script(script: Path, folder: Path) -> None:
    os.chdir(folder)
    warnings.simplefilter("error")
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
