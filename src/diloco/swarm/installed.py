"""Checks that this machine can take part in a swarm. Imports neither torch nor the packages that it looks for."""

import importlib.util
import sys

from diloco.errors import ConfigError, install_hint

PACKAGES = ("hivemind", "msgspec", "base58", "cryptography")


def check_swarm() -> None:
    """Raises ConfigError on another system than Linux, or if a package is missing."""
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"the swarm engine runs on Linux only, not on {sys.platform}: use WSL, Docker or another engine"
        )
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
        raise ConfigError(f"the swarm engine needs {names}: {install_hint('swarm')}")
