"""Runs a sidecar: `python -m diloco.swarm.sidecar FD`, as the supervisor starts it."""

import sys

from diloco.swarm.sidecar.assembly import build
from diloco.swarm.sidecar.process import run

if __name__ == "__main__":
    run(int(sys.argv[1]), build)
