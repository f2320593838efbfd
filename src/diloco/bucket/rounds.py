"""One worker's rounds in a bucket. Each step is an object there (records.py):

    post     the data, then the post that names it
    plan     made by the first worker that may (rules.seconds_to_plan); every worker follows it
    mean     each contributor reduces its range of parts (means.py)
    end      all ranges are there

A worker that missed a round finds the plan, and the mean, where they lie. One that gives a round up closes it with a
plan of no posts, unless there is a plan: no round is left open behind those that go on.
"""

import asyncio
import hashlib
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from diloco.bucket import rules
from diloco.bucket.means import CollectedMean, RoundRemoved, collect_mean, memory_of
from diloco.bucket.members import BucketMembers, Emit
from diloco.bucket.records import (
    Malformed,
    Post,
    RoundPlan,
    VectorEncoding,
    decode,
    encode,
    number_in,
    round_prefix,
    sequence_of,
    sequence_prefix,
)
from diloco.bucket.settings import BucketSettings
from diloco.bucket.store import PatientStore, Store, Stored, StoreUnavailable
from diloco.core.config import Merge
from diloco.engines.rounds import Comparison, RoundKey, RoundPhases

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PostedRound:
    """A round as the trainer posts it."""

    key: RoundKey
    header: bytes
    note: bytes
    encoding: VectorEncoding
    data: Tensor
    """All encoded parts on the CPU, unchanged until the round has ended."""
    mean: Tensor
    """Where the encoded mean goes, on the CPU. It may be the memory of `data`."""
    max_norm_ratio: float | None
    merge: Merge
    deadline_seconds: float


@dataclass(frozen=True)
class BucketRoundEnd:
    """How a round ended for this worker: with the plan and its mean, or with why not."""

    key: RoundKey
    plan: RoundPlan | None = None
    failure: str | None = None
    resync: bool = False
    """The others have ended the round, or may have, without this worker."""
    comparison: Comparison = field(default_factory=Comparison)
    phases: RoundPhases = field(default_factory=RoundPhases)
    mean_digest: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0


class Rounds:
    """Posts, plans and means, as this worker writes and reads them."""

    def __init__(
        self, settings: BucketSettings, members: BucketMembers, emit: Emit, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._members = members
        self._emit = emit
        self._clock = clock
        self._seen = rules.RoundsSeen()
        self._given_up: set[RoundKey] = set()
        """Rounds that this worker has left without knowing how they end."""
        self.next_round = 0
        """The first round that this worker has not posted."""
        self.due_round = -1
        """The latest round that the others wait for no longer."""

    # A round of this worker

    async def take_part(self, store: PatientStore, posted: PostedRound) -> BucketRoundEnd:
        """Post, follow the round's plan, and bring the mean into `posted.mean`."""
        started = self._clock()
        key = posted.key
        self._given_up.add(key)  # until it is known how it ended, also if this is cancelled
        status = self._members.status
        self.next_round = max(self.next_round, key.sequence + 1)
        status.next_round = max(status.next_round, key.sequence)
        try:
            ended = await self._take_part(store, posted, started + posted.deadline_seconds)
        except StoreUnavailable as problem:
            ended = BucketRoundEnd(key, failure=f"the bucket cannot be reached: {problem}", resync=True)
        except RoundRemoved as problem:
            ended = BucketRoundEnd(key, failure=str(problem), resync=True)
        except Malformed as problem:  # what decides the round cannot be read: no worker has a mean of it
            ended = BucketRoundEnd(key, failure=f"its plan cannot be read: {problem}")
            self._given_up.discard(key)
        if ended.plan is not None:
            self._given_up.discard(key)
        status.next_round = max(status.next_round, key.sequence + 1)
        if ended.resync:
            status.has_state = False
        seconds = self._clock() - started
        return replace(ended, sent_bytes=store.sent_bytes, received_bytes=store.received_bytes, seconds=seconds)

    async def _take_part(self, store: Store, posted: PostedRound, deadline: float) -> BucketRoundEnd:
        key = posted.key
        prefix = round_prefix(key)
        own = self._members.own
        missed = BucketRoundEnd(key, failure="the others ended it without this worker", resync=True)
        if await self._has_ended(store, key):
            return missed
        data = memory_of(posted.data)
        digests = await asyncio.to_thread(posted.encoding.digests, data)
        post = Post(own, posted.header, posted.note, secrets.token_hex(8), posted.encoding, digests)
        if len(data):
            await store.put(post.data_name, data)
        before = self._clock()
        is_first = await store.create(f"{prefix}post/{own}", encode(post))
        posted_at = self._clock()
        plan, made_at = await self._planned(store, posted, (before, posted_at), deadline)
        heard_at = self._clock()
        if not is_first:  # the mean may have the work of that process, which this one's is not
            return BucketRoundEnd(key, failure="an earlier process of this worker has posted in it", resync=True)
        if plan.post_of(own) != post:
            return missed
        mean = await self._collect(store, plan, made_at, posted.data, posted.mean)
        ended_at = self._clock()
        self.record_end(mean.plan, made_at)
        mean_digest = ""
        if mean.plan.has_mean:
            mean_digest = (await asyncio.to_thread(hashlib.sha256, memory_of(posted.mean))).hexdigest()[:16]
        phases = RoundPhases(
            others_seconds=heard_at - posted_at,
            send_seconds=max(0.0, ended_at - heard_at - (mean.reduce_seconds or 0.0)),
            reduce_seconds=mean.reduce_seconds,
        )
        return BucketRoundEnd(key, mean.plan, comparison=mean.comparison, phases=phases, mean_digest=mean_digest)

    async def _has_ended(self, store: Store, key: RoundKey) -> bool:
        """Whether there is a plan of this round, or was: the round is removed once there are two later states."""
        if await store.read_range(f"{round_prefix(key)}plan", 0, 1) is not None:
            return True
        return key.fragment >= 0 and await self._has_state_after(store, key.sequence)

    async def _check_not_removed(self, store: Store, key: RoundKey) -> None:
        """Raise RoundRemoved if a round in which this worker has posted ended so long ago that it may be gone."""
        if key.fragment >= 0 and await self._has_state_after(store, key.sequence):
            raise RoundRemoved(f"round {key.sequence} ended long ago, while this worker slept")

    async def _has_state_after(self, store: Store, sequence: int) -> bool:
        """Whether there is a state with this round in it, and so the round has ended."""
        names = [stored.name for stored in await store.list("states/")]
        states = [sequence_of(name) for name in names if name.endswith("/record")]
        return any(state is not None and state > sequence for state in states)

    async def _collect(
        self, store: Store, plan: RoundPlan, made_at: float, own_data: Tensor | None, out: Tensor
    ) -> CollectedMean:
        return await collect_mean(
            store,
            self._settings,
            plan,
            self._members.own,
            own_data,
            out,
            emit=self._emit,
            clock=self._clock,
            seconds_since_plan=lambda: self._members.now() - made_at,
        )

    async def _planned(
        self, store: Store, posted: PostedRound, written: tuple[float, float], deadline: float
    ) -> tuple[RoundPlan, float]:
        """The round's plan, and when it was made: this worker makes it if it is the first one that may.

        `written`: the moments between which this worker's post was written.
        """
        prefix = round_prefix(posted.key)
        settings = self._settings
        own = self._members.own
        while True:
            listed = {stored.name.removeprefix(prefix): stored for stored in await store.list(prefix)}
            posts = _posts_in(listed)
            if own in posts:
                self._members.learn_time(posts[own], *written)
            else:  # a listing may lag behind; or this machine slept, and the round is removed
                await self._check_not_removed(store, posted.key)
                posts[own] = Stored(f"{prefix}post/{own}", 0, self._members.now())
            wait = self._seconds_to_plan(posts, posted.key.sequence, settings.patience)
            if wait <= 0:  # look who is there now, before a round goes on without them
                await self._members.listen(store)
                wait = self._seconds_to_plan(posts, posted.key.sequence, settings.patience)
            is_due = wait <= 0 or self._clock() >= deadline
            if is_due and "plan" not in listed:
                await self._check_not_removed(store, posted.key)
                await self._make_plan(store, posted, posts)
            if is_due or "plan" in listed:
                plan = await self._read_plan(store, posted.key)
                if plan is not None:
                    return plan, listed["plan"].modified if "plan" in listed else self._members.now()
            if self._clock() >= deadline + settings.timeout_seconds:
                raise StoreUnavailable("no plan of the round can be made or seen")
            waited = self._clock() - written[1]
            poll = rules.poll_seconds(waited, settings.least_poll_seconds, settings.most_poll_seconds)
            left = math.inf if is_due else min(wait, deadline - self._clock())
            await asyncio.sleep(max(settings.least_poll_seconds, min(left, poll)))

    async def _read_plan(self, store: Store, key: RoundKey) -> RoundPlan | None:
        """None: there is none, or it cannot be seen yet."""
        content = await store.read(f"{round_prefix(key)}plan")
        if content is None:
            return None
        plan = decode(content, RoundPlan)
        if plan.key.sequence != key.sequence or (plan.posts and plan.key != key):
            raise Malformed(f"it is of round {plan.key.sequence}, fragment {plan.key.fragment}")
        return plan

    def _seconds_to_plan(self, posts: Mapping[int, Stored], sequence: int, patience: float) -> float:
        """`patience`: in usual times from round to round; before one is known, in longest times."""
        now = self._members.now()
        members = self._members
        expected = rules.expected_members(members.others, self._seen, sequence, members.own, now)
        usual = self._seen.usual_seconds or self._settings.timeout_seconds
        posted_at = {number: stored.modified for number, stored in posts.items()}
        return rules.seconds_to_plan(posted_at, expected, now, patience * usual)

    async def _make_plan(self, store: Store, posted: PostedRound, posts: Mapping[int, Stored]) -> None:
        """Create the plan of all sound posts, unless another worker has just done so."""
        key = posted.key
        own = self._members.own
        numbers = sorted(posts)
        contents = await asyncio.gather(*(store.read(posts[number].name) for number in numbers))
        sound: dict[int, Post] = {}
        for number, content in zip(numbers, contents, strict=True):
            try:
                if content is not None:
                    sound[number] = _checked(decode(content, Post), number, posted)
            except Malformed as problem:
                self._tell_malformed(number, key, str(problem))
        first = sound.get(own) or next(iter(sound.values()), None)
        if first is None:
            return
        layout = first.parsed.layout_digest
        same = [post for post in sound.values() if post.parsed.layout_digest == layout]
        for post in sound.values():
            if post not in same:
                reason = f"layout {post.parsed.layout_digest} against {layout}: another model or settings"
                self._tell_malformed(post.worker, key, reason)
        rounds = rules.rounds_of_work(self._seen, key.fragment, [post.worker for post in same])
        plan = RoundPlan(key, tuple(same), posted.max_norm_ratio, posted.merge, rounds)
        await store.create(f"{round_prefix(key)}plan", encode(plan))

    def _tell_malformed(self, worker: int, key: RoundKey, reason: str) -> None:
        self._emit("malformed_post", {"member": worker, "round": key.sequence, "reason": reason})

    def record_end(self, plan: RoundPlan, made_at: float) -> None:
        """A round has ended, with this worker in it or before it came."""
        self._seen.record(plan, made_at)
        status = self._members.status
        sequence = plan.key.sequence
        status.ended_round = max(status.ended_round, sequence)
        if self._members.own in plan.decision.contributors:
            status.contributed_round = sequence

    async def remove_data(self, store: Store, plan: RoundPlan) -> None:
        """Remove the contributions to an earlier round; the first worker of each plan does."""
        old = plan.key.sequence - self._settings.kept_rounds
        if old >= 0 and plan.posts[0].worker == self._members.own:
            stored = await store.list(f"{sequence_prefix(old)}data/")
            await store.delete([each.name for each in stored])

    # Rounds of others

    async def close_given_up(self, store: Store) -> None:
        """End the rounds that this worker has left without knowing how they end: without a mean, if there is no plan.

        The work that it has posted there is then in no mean, and no later one finds a round open behind it.
        """
        for key in sorted(self._given_up, key=lambda key: key.sequence):
            if key.fragment >= 0 and not await self._has_ended(store, key):
                await self._close(store, key.sequence)
            self._given_up.discard(key)

    async def _close(self, store: Store, sequence: int) -> None:
        key = RoundKey(sequence, 0)
        await store.create(f"{round_prefix(key)}plan", encode(RoundPlan(key)))

    async def means_from(
        self, store: Store, first: int, most_bytes: int | None
    ) -> list[tuple[RoundPlan, Tensor | None]]:
        """The rounds from `first` on that others have planned, one after another, with their means; None: it has none.

        A mean of which ranges are missing is completed here: its workers may all be gone. `most_bytes`: a larger mean
        is not of this run.
        """
        planned = {
            sequence: stored.modified
            for stored in await store.list("rounds/")
            if stored.name.endswith("/plan") and (sequence := sequence_of(stored.name)) is not None
        }
        means: list[tuple[RoundPlan, Tensor | None]] = []
        for sequence in range(first, max(planned, default=-1) + 1):
            key = RoundKey(sequence, 0)
            if sequence not in planned:  # it was left open, by a worker that has died perhaps
                if await self._has_ended(store, key):
                    raise Malformed(f"round {sequence} was removed")
                await self._close(store, sequence)
            means.append(await self._mean_of(store, key, planned.get(sequence, self._members.now()), most_bytes))
        if await self._has_state_after(store, first + len(means)):
            raise Malformed(f"rounds after round {first + len(means) - 1} were removed")
        return means

    async def _mean_of(
        self, store: Store, key: RoundKey, made_at: float, most_bytes: int | None
    ) -> tuple[RoundPlan, Tensor | None]:
        """The round's plan and its mean. A plan that cannot be read counts for no worker."""
        content = await store.read(f"{round_prefix(key)}plan")
        if content is None:
            raise Malformed(f"the plan of round {key.sequence} is gone")
        try:
            plan = decode(content, RoundPlan)
            if plan.key.sequence != key.sequence or plan.key.fragment < 0:
                raise Malformed(f"it is of round {plan.key.sequence}, fragment {plan.key.fragment}")
        except Malformed as problem:
            logger.warning("round %d has no mean: its plan cannot be read: %s", key.sequence, problem)
            return RoundPlan(key), None
        mean = None
        if plan.has_mean:
            shape = plan.encoding.num_parts, plan.encoding.mean_part_bytes
            if most_bytes is not None and math.prod(shape) > most_bytes:
                raise Malformed(f"the mean of round {key.sequence} is larger than this model")
            mean = torch.empty(shape, dtype=torch.uint8)
            try:
                collected = await self._collect(store, plan, made_at, None, mean)
            except RoundRemoved as problem:
                raise Malformed(str(problem)) from problem
            plan = collected.plan
        self.record_end(plan, made_at)
        return plan, mean if plan.has_mean else None

    async def look_ahead(self, store: Store) -> None:
        """See whether the others are in the next round and will not wait much longer (`due_round`)."""
        sequence = self.next_round
        prefix = sequence_prefix(sequence)
        listed = {stored.name.removeprefix(prefix): stored for stored in await store.list(prefix)}
        posts = _posts_in(listed)
        half_of_patience = 0.5 * self._settings.patience
        if "plan" in listed or (posts and self._seconds_to_plan(posts, sequence, half_of_patience) <= 0):
            self.due_round = max(self.due_round, sequence)


def _posts_in(listed: Mapping[str, Stored]) -> dict[int, Stored]:
    """The posts of a round by worker; `listed`: its objects by the rest of their name."""
    posts = {}
    for name, stored in listed.items():
        number = number_in(name)
        if number is not None and name == f"post/{number}":
            posts[number] = stored
    return posts


def _checked(post: Post, number: int, posted: PostedRound) -> Post:
    """A post of the same round, by the worker that its name says."""
    if post.worker != number or post.parsed.key != posted.key or post.encoding != posted.encoding:
        raise Malformed("it is of another worker, round or encoding")
    return post
