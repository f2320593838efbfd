"""Makes tests/support importable, which benchmarks share with the tests: import it before anything of `support`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
