"""No attack: the workers of benchmarks/checking.py leave their checks out in the rounds in which a file is there.

So the same workers end rounds with and without them, in turn, and what differs is their price. All must do it: a round
of some that check and others that do not fails. CHECKS_OFF names the file.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks import instead_of
from diloco.engines.reduction import reduce_parts
from diloco.swarm.audit import merkle
from diloco.swarm.audit.mean_check import MeanCheck
from diloco.swarm.audit.own_contributions import OwnContributions
from diloco.swarm.audit.transfer import AuditedTransfer, CommittedParts, NormCheck
from diloco.swarm.node import transfer
from diloco.swarm.protocol.certificate import Notary, RangeDigest

CHECKS_OFF = "CHECKS_OFF"
_DIGEST = bytes(32)
_SIGNATURE = bytes(64)


def leave_checks_out() -> None:
    """Hashes, signatures and norms are constants then, and no mean is checked after its round."""
    off_file = Path(os.environ[CHECKS_OFF])

    def constant(owner: Any, name: str, without: Callable[..., Any]) -> None:
        @instead_of(owner, name)
        def either(honest: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            return (without if off_file.exists() else honest)(*arguments, **keywords)

    def reduce(*arguments: Any, **keywords: Any) -> Any:
        """Without the norms of the contributions."""
        return reduce_parts(*arguments, **keywords | {"squares": None})

    constant(transfer, "reduce_parts", reduce)
    constant(merkle, "leaves", lambda data, part_bytes: [_DIGEST] * (len(data) // part_bytes))
    constant(merkle, "root", lambda _: _DIGEST)
    constant(merkle, "prove", lambda *_: b"")
    constant(AuditedTransfer, "_squared_norm", lambda *_: 0.0)
    constant(Notary, "sign", lambda *_: _SIGNATURE)
    constant(Notary, "has_signed", lambda *_: True)
    for owner, name in (
        (RangeDigest, "add"),
        (CommittedParts, "add"),
        (CommittedParts, "stranger"),
        (NormCheck, "add"),
        (NormCheck, "fault_of_mean"),
        (OwnContributions, "keep"),
        (MeanCheck, "begin"),
    ):
        constant(owner, name, lambda *_: None)
