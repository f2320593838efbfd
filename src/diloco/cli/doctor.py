"""`diloco doctor [INVITATION]`: can this machine be in a swarm, and how well?"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from diloco.errors import EngineError

if TYPE_CHECKING:
    from diloco.engines.swarm.doctor.local_checks import Finding
    from diloco.engines.swarm.network.addresses import ListenConfig

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    invitation: str | None = None,
    /,
    *,
    host: str | None = None,
    port: int | None = None,
    announce: tuple[str, ...] = (),
    folder: Path = Path("runs"),
) -> None:
    """Check whether this machine can be in a swarm, and how well.

    With an invitation also whether the others can be reached, whether they
    can reach this machine, the clocks, a relay, latency and bandwidth.
    Every check that is not well says what to do; exit code 1 if one failed.
    Example:  diloco doctor INVITATION --port 4000

    Parameters
    ----------
    invitation
        As `diloco invite RUN` prints it.
    host
        The address that a worker would listen at; all if left out.
    port
        The port that it would listen at; any if left out.
    announce
        What others would be told instead of this machine's own addresses.
    folder
        Where runs are kept.
    """
    from diloco.engines.swarm.network.addresses import ListenConfig

    failed = asyncio.run(_print_all(_findings(invitation, ListenConfig(host, port, announce), folder)))
    if failed:
        raise EngineError(f"{failed} of the checks failed; what to do is said with each")


async def _findings(invitation: str | None, network: "ListenConfig", folder: Path) -> "AsyncIterator[Finding]":
    from diloco.engines.swarm.doctor import local_checks as checks

    missing = False
    for finding in checks.look_at_packages():
        missing |= finding.state == "failed"
        yield finding
    yield checks.look_at_gpu()
    yield checks.look_at_disk(folder)
    yield checks.look_at_addresses()
    port = checks.look_at_port(network)
    yield port
    if missing:
        return
    daemon = await checks.look_at_daemon()
    yield daemon
    if invitation is None or "failed" in (daemon.state, port.state):
        return
    from diloco.engines.swarm.doctor import remote_checks as checks_outside

    finding, parsed = checks_outside.look_at_invitation(invitation)
    yield finding
    if parsed is not None:
        async for finding in checks_outside.look_outside(parsed, network):
            yield finding


async def _print_all(findings: "AsyncIterator[Finding]") -> int:
    """Each as soon as it is known; returns how many failed."""
    console, failed = Console(), 0
    async for finding in findings:
        failed += finding.state == "failed"
        line = Text.assemble((f"{finding.state:8}", _STYLES[finding.state]), f"{finding.name:13}{finding.told}")
        console.print(line, soft_wrap=True)
        if finding.remedy is not None:
            console.print(Text(f"{'':21}→ {finding.remedy}", style="dim"), soft_wrap=True)
    return failed
