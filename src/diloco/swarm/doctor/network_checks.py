"""Checks of `diloco doctor`: whether p2pd runs here, and this machine's port and addresses. Nothing is changed."""

from diloco.errors import DiLoCoError, install_hint
from diloco.swarm.doctor.machine_checks import Finding
from diloco.swarm.network.addresses import ListenConfig
from diloco.swarm.network.listen_port import check_ports
from diloco.swarm.network.p2pd import process as p2pd
from diloco.swarm.network.p2pd.process import Daemon
from diloco.swarm.network.reachability import own_addresses


async def check_daemon() -> Finding:
    try:
        p2pd.messages()
        daemon = await Daemon.start(["-hostAddrs=/ip4/127.0.0.1/tcp/0"])
        await daemon.stop()
    except DiLoCoError as error:
        return Finding("p2pd", "failed", str(error), install_hint("swarm"))
    return Finding("p2pd", "ok", "runs")


def check_port(config: ListenConfig) -> Finding:
    try:
        check_ports(config.listen_addresses())
        config.announced_addresses()
    except DiLoCoError as error:
        return Finding("port", "failed", str(error), "choose another --host, --port or --announce")
    if config.port is None:
        return Finding("port", "ok", "any free one; choose it with --port if a router or firewall must let it in")
    return Finding("port", "ok", f"{config.port} is free")


def check_addresses() -> Finding:
    found = own_addresses()
    message = ", ".join(f"{ip} ({'public' if ip.is_global else 'private'})" for ip in found)
    if not found:
        return Finding("addresses", "failed", "no network", "connect this machine; workers on it alone need none")
    if any(ip.is_global for ip in found):
        return Finding("addresses", "ok", message)
    return Finding(
        "addresses",
        "ok",
        f"{message}: machines outside this network can reach it only if its router forwards a port (then --announce "
        "ROUTER:PORT), or through a public worker",
    )
