"""The codes of refusals that end something. A refusal with any other code, also an unknown one, is tried again later.

unknown, hello      say hello (again): the asked peer has restarted, or has forgotten a worker that was away for long
busy, leader        not now; or another member decides it
few                 too few workers are left in the round
number              another worker has this one's number: ask the leader for another
forged, expired     the credential is no good
seats               all seats of the invitation are taken by other workers
banned, revoked     this peer is out of the run
again, twice        another process has this peer's identity, and may be dead; and is known to be live
replaced, process   another process has taken this one's place; and the place of the one that is asked
version, model      another version of diloco; another model, data, codec or schedule
term                a leader's term is too far ahead of the last one
plan                the plan is not one that this worker can follow
rounds              a worker counts in it as more rounds of work than it has missed, as the asked worker has seen
malformed           the asked peer cannot read the message
"""

NOT_ADMITTED = frozenset({"forged", "expired", "seats", "banned", "revoked", "twice", "replaced", "version"})
"""A peer that says hello is not let in, however often it asks."""
OUT_OF_THE_RUN = frozenset({"banned", "revoked", "twice", "replaced"})
"""No later round of this worker can succeed, once most members say so; nor with the code `model`."""
