"""`diloco doctor [-]`: can this machine be in a swarm, and how well?"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.text import Text

from diloco.cli.config_parser import HYPHEN
from diloco.errors import EngineError

if TYPE_CHECKING:
    from diloco.swarm.doctor.machine_checks import Finding

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    invitation: Annotated[str | None, HYPHEN] = None,
    /,
    *,
    host: str | None = None,
    port: int | None = None,
    announce: tuple[str, ...] = (),
    folder: Path = Path("runs"),
) -> None:
    """Check whether this machine can be in a swarm, and how well.

    With an invitation also whether the swarm's workers can be reached, whether
    they can reach this machine, clocks, relays, latency and bandwidth.
    A check that finds a problem says what to do; exit code 1 if one failed.
    Example:  diloco doctor - --port 4000

    Parameters
    ----------
    invitation
        `-` (standard input), `@FILE`, or the word; DILOCO_INVITATION if it is left out and set.
    host
        The address that a worker would listen at; all if left out.
    port
        The port that it would listen at; any if left out.
    announce
        The address that others would call instead of this machine's own.
    folder
        Where runs are kept.
    """
    failed = asyncio.run(_print_all(_findings(invitation, host, port, announce, folder)))
    if failed:
        raise EngineError(f"{failed} of the checks failed; each one says what to do")


async def _findings(
    invitation: str | None, host: str | None, port: int | None, announce: tuple[str, ...], folder: Path
) -> "AsyncIterator[Finding]":
    from diloco.swarm.doctor import machine_checks

    missing = False
    for finding in machine_checks.check_packages():
        missing |= finding.state == "failed"
        yield finding
    yield machine_checks.check_gpu()
    yield machine_checks.check_disk(folder)
    if missing:
        return  # the other checks import these packages
    from diloco.swarm.doctor import network_checks
    from diloco.swarm.network.listening import ListenConfig

    config = ListenConfig(host, port, announce)
    yield network_checks.check_addresses()
    port_found = network_checks.check_port(config)
    yield port_found
    daemon = await network_checks.check_daemon()
    yield daemon
    from diloco.swarm.trust.invitation import VARIABLE

    given = [] if invitation is None else [invitation]
    if not (given or os.environ.get(VARIABLE)) or "failed" in (daemon.state, port_found.state):
        return
    finding, parsed = network_checks.check_invitation(given)
    yield finding
    if parsed is not None:
        async for finding in network_checks.check_swarm(parsed, config):
            yield finding


async def _print_all(findings: "AsyncIterator[Finding]") -> int:
    """Print each finding as soon as it is known; returns the number of failed checks."""
    console = Console()
    failed = 0
    async for finding in findings:
        failed += finding.state == "failed"
        line = Text.assemble((f"{finding.state:8}", _STYLES[finding.state]), f"{finding.name:13}{finding.message}")
        console.print(line, soft_wrap=True)
        if finding.remedy is not None:
            console.print(Text(f"{'':21}→ {finding.remedy}", style="dim"), soft_wrap=True)
    return failed
