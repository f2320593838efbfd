"""States for joiners: written into the bucket every few rounds by whichever worker is first, and read by joiners.

What no worker needs any more is removed with each new state: all before the last state but one.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diloco.bucket import rules
from diloco.bucket.files import download
from diloco.bucket.records import Malformed, MemberClaim, StateRecord, decode, encode, sequence_of, state_prefix
from diloco.bucket.store import Store, StoreUnavailable
from diloco.engines.rounds import GlobalState
from diloco.errors import RoundFailed
from diloco.safetensors_files import file_chunks

logger = logging.getLogger(__name__)

_HEAD_BYTES = 1 << 22
"""The names and shapes in a file of tensors, at most."""


class States:
    """The states in the bucket, as this worker writes and reads them."""

    def __init__(self, every: int, label: str) -> None:
        """`every`: a state is due so many rounds after the last one. `label`: names this worker in its claim."""
        self._every = every
        self._label = label[:64]
        self._writing = False
        self.paused = False
        """The trainer's state is about to be replaced by a saved one: none is written now."""
        self.newest: int | None = None
        """The round that the newest known state comes before."""
        self.snapshot: Callable[[], GlobalState] | None = None
        """The trainer's state; raises RoundFailed if there is none now. It is called in a thread of its own."""

    async def learn(self, store: Store) -> list[int]:
        """Look which states there are."""
        states = [
            sequence
            for stored in await store.list("states/")
            if stored.name.endswith("/record") and (sequence := sequence_of(stored.name)) is not None
        ]
        self.newest = max(states, default=None)
        return states

    async def read(self, store: Store, sequence: int, most_bytes: int | None) -> tuple[StateRecord, dict[str, Tensor]]:
        """Read the state before a round; raises RoundFailed if it cannot be used. `most_bytes` of tensors: a state with
        more is not of this run."""
        prefix = state_prefix(sequence)
        content = await store.read(f"{prefix}record")
        try:
            if content is None:
                raise Malformed("it is gone")
            record = decode(content, StateRecord)
            if record.numbers.get("sequence") != sequence:
                raise Malformed("it is of another round")
            if most_bytes is not None and record.num_bytes > most_bytes + _HEAD_BYTES:
                raise Malformed(f"it has {record.num_bytes:,} bytes, and this model's at most {most_bytes:,}")
            with TemporaryDirectory(prefix="diloco-state-") as folder:
                path = Path(folder) / "state.safetensors"
                await download(store, f"{prefix}{record.tensors}", record.num_bytes, path, record.digest)
                tensors = await asyncio.to_thread(load_file, path)
        except (Malformed, SafetensorError) as problem:
            raise RoundFailed(f"the state before round {sequence} cannot be used: {problem}") from problem
        return record, tensors

    async def write_if_due(self, store: Store, next_round: int) -> None:
        """Write the state for joiners, unless another worker does."""
        if (
            self.snapshot is None
            or self.paused
            or self._writing
            or not rules.is_state_due(next_round, self.newest, self._every)
        ):
            return
        self._writing = True
        try:
            states = await self.learn(store)
            if rules.is_state_due(next_round, self.newest, self._every):
                await self._write(store, self.snapshot, states)
        except RoundFailed as reason:
            logger.info("no state is written for joiners now: %s", reason)
        except (StoreUnavailable, OSError) as problem:  # or a full disk: it is due after the next round too
            logger.warning("the state for joiners was not written: %s", problem)
        finally:
            self._writing = False

    async def _write(self, store: Store, snapshot: Callable[[], GlobalState], states: list[int]) -> None:
        state = await asyncio.to_thread(snapshot)
        sequence = state.numbers["sequence"]
        prefix = state_prefix(sequence)
        claim = encode(MemberClaim(secrets.token_hex(8), self._label))
        if sequence in states or not await store.create(f"{prefix}claim", claim):
            return  # another worker writes it; should that one die, the state after the next round is due
        with TemporaryDirectory(prefix="diloco-state-") as folder:
            path = Path(folder) / "state.safetensors"
            digest, num_bytes = await asyncio.to_thread(_write_file, path, state.tensors)
            tensors = f"tensors-{secrets.token_hex(8)}"
            await store.put(f"{prefix}{tensors}", path)
        record = StateRecord(dict(state.numbers), state.layout_digest, state.note, tensors, num_bytes, digest)
        await store.create(f"{prefix}record", encode(record))
        await self._remove_expired(store)

    async def _remove_expired(self, store: Store) -> None:
        first = rules.first_kept(await self.learn(store))
        if first is None:
            return
        for prefix in ("states/", "rounds/", "ends/"):  # also what writers that have died have left there
            numbered = {each.name: sequence_of(each.name) for each in await store.list(prefix)}
            expired = [name for name, number in numbered.items() if number is not None and number < first]
            await store.delete([name for name in expired if name.endswith(("/plan", "/record"))])  # what all else is of
            await store.delete([name for name in expired if not name.endswith(("/plan", "/record"))])


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    hashed = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in file_chunks(tensors):
            hashed.update(chunk)
            file.write(chunk)
    return hashed.digest(), path.stat().st_size
