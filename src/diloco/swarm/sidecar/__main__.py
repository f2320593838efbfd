"""Runs a sidecar: `python -m diloco.swarm.sidecar FD`, as the supervisor starts it.

Here it is put together: this worker's identity and credential, p2pd, and the node on top of it.
"""

import contextlib
import sys
from dataclasses import replace

import torch

from diloco.errors import ConfigError
from diloco.swarm.audit.auditor import Auditor
from diloco.swarm.network.known_peers import read_peers
from diloco.swarm.network.listening import ListenConfig
from diloco.swarm.network.p2pd.transport import P2pdTransport, protocol_of
from diloco.swarm.node.node import Node
from diloco.swarm.run_files import PEERS_FILE, invitation_file
from diloco.swarm.settings import Settings
from diloco.swarm.sidecar.process import NodeWithNetwork, run
from diloco.swarm.trainer import Trainer
from diloco.swarm.trust.invitation import Invitation
from diloco.swarm.trust.permissions import Permissions

_SHARE_OF_THREADS = 4
"""One in so many of the worker's threads is for the node: the trainer and the network need the other cores."""


async def build(settings: Settings, trainer: Trainer, next_round: int | None) -> NodeWithNetwork:
    """Build a node and the network under it.

    `next_round` is the first round that the trainer has not merged, if it was in this swarm before. A worker that has
    the state may found the swarm again if no other worker is left.
    """
    torch.set_num_threads(max(1, settings.threads // _SHARE_OF_THREADS))
    invitation = _invitation(settings)
    network = ListenConfig(settings.host, settings.port, settings.announce)
    met = read_peers(settings.path(PEERS_FILE))
    seeds = [*invitation.addresses, *(address for peer in met for address in peer.addresses)]
    transport = await P2pdTransport.create(
        settings.path(f"{settings.name}.key"), protocol_of(invitation.run_id), network, seeds
    )
    credential = invitation.credential(transport.peer)
    permissions = Permissions(invitation.run_public, transport.peer, credential, settings.refusals_to_ban)
    settings = replace(settings, founder=settings.founder or next_round is not None)
    node = Node(transport, permissions, settings, trainer, Auditor)
    node.outcomes.recent.next_to_merge = next_round

    async def close() -> None:
        with contextlib.suppress(OSError):
            await transport.close()

    return NodeWithNetwork(node, transport.ended, close)


def _invitation(settings: Settings) -> Invitation:
    path = settings.path(invitation_file(settings.name))
    try:
        return Invitation.parse(path.read_text(), None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): join with an invitation first") from error


if __name__ == "__main__":
    run(int(sys.argv[1]), build)
