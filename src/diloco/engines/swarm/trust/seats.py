"""The seats of invitations: how many workers may come with one, as its certificate says.

Every member counts for itself, from the workers that have proved their key to it by a hello. A seat belongs to the
peer that took it first, for ever: a worker that returns has its own, and one that was banned leaves none to another.
So no founder must be there to count, and an invitation that is passed on lets in no more than it was made for.
A worker that another member names takes no seat, since it may be invented. One member can name as many as seats are
free: what it invents keeps neither a worker that says hello out, nor those that other members name.
"""

from diloco.engines.swarm.network.limits import LruCache
from diloco.engines.swarm.trust.credential import MAX_SEATS, Certificate, Credential, PeerRefused

_MAX_INVITATIONS = 4096


class Seats:
    def __init__(self) -> None:
        self._taken: LruCache[dict[str, None]] = LruCache(_MAX_INVITATIONS)
        self._named: LruCache[dict[str, None]] = LruCache(_MAX_INVITATIONS)
        """By invitation and the member that has named them."""

    def take(self, credential: Credential | None, peer: str) -> None:
        """Raises PeerRefused if all seats are taken."""
        assert credential is not None
        certificate = credential.certificate
        taken = self._taken.get(certificate.id) or {}
        if peer not in taken and len(taken) >= certificate.seats:
            raise _no_seat(certificate)
        self._taken.put(certificate.id, taken | {peer: None})

    def name(self, credential: Credential | None, peer: str, teller: str) -> None:
        """Raises PeerRefused if there is no seat for all that this member has named."""
        assert credential is not None
        certificate = credential.certificate
        taken = self._taken.get(certificate.id) or {}
        named = (self._named.get(f"{certificate.id} {teller}") or {}) | {peer: None}
        if len(named | taken) > certificate.seats:
            raise _no_seat(certificate)
        self._named.put(f"{certificate.id} {teller}", named)

    def reserve(self, invitation: str, peer: str) -> None:
        taken = self._taken.get(invitation) or {}
        if len(taken) < MAX_SEATS:
            self._taken.put(invitation, taken | {peer: None})


def _no_seat(certificate: Certificate) -> PeerRefused:
    of = f"the {certificate.seats} seats" if certificate.seats > 1 else "the one seat"
    return PeerRefused(
        "seats",
        f"{of} of the invitation {certificate.id} {'are' if certificate.seats > 1 else 'is'} taken: ask the owner of "
        "the run for another one (diloco invite RUN --seats N)",
    )
