"""A worker's own status, sent with every heartbeat, and the status of the whole run as `diloco status` shows it."""

from collections.abc import Mapping
from math import isfinite
from typing import Annotated

from msgspec import Meta, Struct

from diloco.swarm.network.multiaddr import CIRCUIT

MAX_NUMBER = 1 << 20
Count = Annotated[int, Meta(ge=-1, le=1 << 62)]
PeerName = Annotated[str, Meta(max_length=128)]
Process = Annotated[str, Meta(max_length=64)]
"""Names a process: when it started, and a random number."""
Addresses = Annotated[tuple[Annotated[str, Meta(max_length=512)], ...], Meta(max_length=16)]
"""Multiaddrs of one peer."""


class Status(Struct, forbid_unknown_fields=True):
    number: Annotated[int, Meta(ge=-1, le=MAX_NUMBER)] = -1
    """The worker number; −1 before the worker has one."""
    has_state: bool = False
    """The worker has the global state, and takes part in rounds."""
    next_round: Count = 0
    """The round that it is in, or posts next."""
    waiting_round: Count = -1
    """The first round that it has posted and that has not ended for it; −1 if there is none."""
    ended_round: Count = -1
    """The last round that has ended for it."""
    position: Count = 0
    """Inner steps, as a position in the schedule."""
    tokens: Count = 0
    """The tokens that this worker has trained on itself, in all its starts as far as they are in the run."""
    run_tokens: Count = 0
    """The tokens of all workers behind the contributions in the run's means; 0 where they are not counted."""
    loss: float = -1.0
    step_seconds: float = 0.0
    contributed_round: Count = -1
    """The last round that has its contribution in the mean."""
    process: Process = ""
    """The name of its process: of two with one identity the earlier is the lower (node/calls.py)."""
    label: Annotated[str, Meta(max_length=64)] = ""
    """The user's name for the machine."""

    def is_in(self, sequence: int) -> bool:
        """Whether the worker has posted this round, which has not ended for it."""
        return -1 < self.waiting_round <= sequence <= self.next_round

    def has_posted(self, sequence: int) -> bool:
        """Whether the worker is in this round, or past it."""
        return self.next_round > sequence or self.is_in(sequence)

    def gave_up(self, sequence: int) -> bool:
        """Whether the round has failed for this worker, which is in a later one or posts a later one next."""
        return self.ended_round < sequence < self.next_round and not self.is_in(sequence)

    def __post_init__(self) -> None:
        if not (isfinite(self.loss) and isfinite(self.step_seconds)):
            raise ValueError(f"loss {self.loss} and step_seconds {self.step_seconds} must be finite")


class OwnStatus(Status):
    """This worker's own status, as it travels in heartbeats. Only these methods write its place in the run."""

    # The process, and its number

    def start_after(self, earlier: str) -> None:
        """Name this process above an earlier one of this worker, also if the machine's clock was set back since."""
        if earlier >= self.process:
            self.process = f"{int(earlier[:20]) + 1:020d}{self.process[20:]}"

    def take_number(self, number: int) -> None:
        self.number = number

    def found_run(self, number: int) -> None:
        """Begin a run: this worker's state is the run's."""
        self.number = number
        self.has_state = True

    # Rounds

    def post(self, sequence: int, first_waiting: int) -> None:
        """This worker is in a round. `first_waiting`: the first one that has not ended for it."""
        self.next_round = max(self.next_round, sequence)
        self.waiting_round = first_waiting

    def leave_round(self, first_waiting: int) -> None:
        """A round has ended or failed here. `first_waiting`: the first one that has not; -1 without any."""
        self.waiting_round = first_waiting

    def spend(self, sequence: int) -> None:
        """The number of a round is used up, however it ended."""
        self.next_round = max(self.next_round, sequence + 1)

    def count(self, sequence: int, *, contributed: bool) -> None:
        """The mean of a round counts here. `contributed`: this worker's work is in it."""
        self.ended_round = max(self.ended_round, sequence)
        if contributed:
            self.contributed_round = sequence

    def miss(self, sequence: int) -> None:
        """A round has ended without this worker, whose state is older now."""
        self.ended_round = max(self.ended_round, sequence)
        self.has_state = False

    # The state

    def lose_state(self) -> None:
        """The others have gone on: this worker leads no round before it has fetched their state."""
        self.has_state = False

    def keep_state(self) -> None:
        """No other member can give a later state: this worker's own is the run's."""
        self.has_state = True

    def take_over(self, next_round: int, position: int) -> None:
        """The others' state is here, before this round."""
        self.ended_round = next_round - 1
        self.next_round = next_round
        self.has_state = True
        self.position = max(self.position, position)

    def fall_back(self, ended_round: int) -> None:
        """This worker went on alone: what it has counted since this round is not the run's."""
        self.ended_round = ended_round

    # Training

    def report(self, values: Mapping[str, float]) -> None:
        """Take what the trainer tells of itself; what is missing stays."""
        self.position = int(values.get("inner_steps", self.position))
        self.tokens = int(values.get("tokens", self.tokens))
        self.run_tokens = int(values.get("run_tokens", self.run_tokens))
        self.step_seconds = float(values.get("step_seconds", self.step_seconds))
        loss = float(values.get("loss", self.loss))
        self.loss = loss if -1e30 < loss < 1e30 else -1.0


class MemberStatus(Status):
    """A member as the asked worker sees it."""

    peer: PeerName = ""
    live: bool = True
    left: bool = False
    silent_seconds: float = 0.0
    latency_seconds: float = 0.0
    addresses: Addresses = ()

    @property
    def link(self) -> str | None:
        """`relay` if it can be reached through relays only, else `direct`; None if no address of it is known."""
        if not self.addresses:
            return None
        return "relay" if all(CIRCUIT in address for address in self.addresses) else "direct"


class RunStatus(Struct, frozen=True, forbid_unknown_fields=True):
    run: Annotated[str, Meta(max_length=512)]
    members: Annotated[tuple[MemberStatus, ...], Meta(max_length=1024)]
    leader: PeerName | None
    leading: dict[str, str]
    """The rounds that the asked worker leads -> their phase."""
    banned: dict[str, str]
    """Peer -> why."""
