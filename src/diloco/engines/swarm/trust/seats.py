"""The seats of invitations: how many workers may come with one, as its certificate says.

Every member counts for itself, from the workers that have said hello or that other members know. A seat belongs to the
peer that took it first, for ever: a worker that returns has its own, and one that was banned leaves none to another.
So no founder must be there to count, and an invitation that is passed on lets in no more than it was made for.
"""

from diloco.engines.swarm.network.limits import LruCache
from diloco.engines.swarm.trust.credential import MAX_SEATS, Credential, PeerRefused

_MAX_INVITATIONS = 4096


class Seats:
    def __init__(self) -> None:
        self._taken: LruCache[dict[str, None]] = LruCache(_MAX_INVITATIONS)

    def take(self, credential: Credential | None, peer: str) -> None:
        """Raises PeerRefused if all seats are taken."""
        assert credential is not None
        certificate = credential.certificate
        taken = self._taken.get(certificate.id) or {}
        if peer not in taken and len(taken) >= certificate.seats:
            of = f"the {certificate.seats} seats" if certificate.seats > 1 else "the one seat"
            raise PeerRefused(
                "seats",
                f"{of} of the invitation {certificate.id} {'are' if certificate.seats > 1 else 'is'} taken: ask the "
                "owner of the run for another one (diloco invite RUN --seats N)",
            )
        self._taken.put(certificate.id, taken | {peer: None})

    def reserve(self, invitation: str, peer: str) -> None:
        taken = self._taken.get(invitation) or {}
        if len(taken) < MAX_SEATS:
            self._taken.put(invitation, taken | {peer: None})
