"""Train one language model together on machines that are far apart: DiLoCo for PyTorch.

    engine = diloco.connect()
    optimizer = diloco.DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=4e-4), engine)

Everything is imported on first use, so that `import diloco` and `diloco --help` are quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from diloco.version import __version__

if TYPE_CHECKING:
    from diloco.bucket.engine import connect_bucket as connect_bucket
    from diloco.core.config import FaultsConfig as FaultsConfig
    from diloco.core.config import SyncConfig as SyncConfig
    from diloco.core.outer_optimizers import SGD as SGD
    from diloco.core.outer_optimizers import Adam as Adam
    from diloco.core.outer_optimizers import Nesterov as Nesterov
    from diloco.core.outer_optimizers import SGDMomentum as SGDMomentum
    from diloco.core.rates import Course as Course
    from diloco.core.rates import LearningRateCurve as LearningRateCurve
    from diloco.engines.connect import connect as connect
    from diloco.engines.local import LocalSwarm as LocalSwarm
    from diloco.engines.local import alone as alone
    from diloco.optimizer import DiLoCo as DiLoCo
    from diloco.swarm.join import join_swarm as join_swarm

_HOMES = {
    "DiLoCo": "diloco.optimizer",
    "connect": "diloco.engines.connect",
    "join_swarm": "diloco.swarm.join",
    "connect_bucket": "diloco.bucket.engine",
    "alone": "diloco.engines.local",
    "LocalSwarm": "diloco.engines.local",
    "SyncConfig": "diloco.core.config",
    "FaultsConfig": "diloco.core.config",
    "Course": "diloco.core.rates",
    "LearningRateCurve": "diloco.core.rates",
    "Nesterov": "diloco.core.outer_optimizers",
    "SGD": "diloco.core.outer_optimizers",
    "SGDMomentum": "diloco.core.outer_optimizers",
    "Adam": "diloco.core.outer_optimizers",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'diloco' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
