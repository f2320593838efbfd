"""Python runs this at its start where the folder is on PYTHONPATH: the network process of the bad member attacks."""

import os
import sys
from pathlib import Path

if "diloco.swarm.sidecar" in sys.orig_argv:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from attacks import begin

    begin(os.environ["ATTACK"])
