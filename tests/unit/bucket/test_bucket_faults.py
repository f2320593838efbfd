"""Workers of a bucket whose store, or whose other members, do the worst that they can (support/bucket.py)."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.bucket import records
from diloco.bucket.records import RoundPlan, encode, round_prefix
from diloco.bucket.store import StoreUnavailable
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.engines.base import Engine
from diloco.engines.rounds import GlobalState, RoundKey, RoundResult
from diloco.errors import ConfigError, EngineError, RoundFailed
from support.bucket import LoopbackBucket, MemoryStore, Objects, post_of
from support.problem import Story, train
from support.rounds import average, contribution, decoded, message, plain_mean
from support.swarm.engines import together
from support.threads import in_threads

SYNC = SyncConfig(3, "int8", fragments=2, overlap_steps=1)


class Faults:
    """One store in memory, and each worker's way to it."""

    def __init__(self, change: Callable[[MemoryStore], None] = lambda _store: None) -> None:
        self.objects = Objects()
        self.stores: list[MemoryStore] = []
        self._change = change

    def __call__(self) -> MemoryStore:
        store = MemoryStore(self.objects)
        self._change(store)
        self.stores.append(store)
        return store


@contextmanager
def workers(count: int, faults: Faults | None = None, **settings: Any) -> Iterator[LoopbackBucket]:
    """Workers that have the state, as `average` needs them."""
    with LoopbackBucket(count, store=faults or Faults(), **settings) as world:
        take_state(*world.engines)
        world.settle()
        yield world


def take_state(*engines: Engine, sequence: int = 0) -> None:
    for engine in engines:
        engine.serve_state(lambda: GlobalState({"x": torch.zeros(3)}, {"sequence": sequence}, "same"))
        engine.fetch_state()


def rounds_of(world: LoopbackBucket, sequence: int = 0, **options: Any) -> list[RoundResult]:
    return together(world.engines, lambda engine: average(engine, sequence, **options))


def told(world: LoopbackBucket, type_: str) -> list[dict[str, Any]]:
    return [fields for name, fields in world.events if name == type_]


def trained(faults: Faults) -> list[Story]:
    with LoopbackBucket(2, store=faults) as world:
        stories, _ = world.train(SYNC, 10, 0)
        return [replace(story.without_mean(), bytes_sent=0) for story in stories]


def trained_locally() -> list[Story]:
    return [
        replace(story, bytes_sent=0) for story in in_threads(2, lambda engine: train(engine, SYNC, 10).without_mean())
    ]


def fails_often(store: MemoryStore) -> None:
    """Every third request fails; of those every second one was carried out, and its answer is lost."""
    count = 0

    def before(_request: str, _name: str) -> None:
        nonlocal count
        count += 1
        store.failures = 0 if count % 3 else 1 + (count // 3) % 2

    store.before = before


def an_hour_ahead(store: MemoryStore) -> None:
    store.objects.now = lambda: time.time() + 3600.0


def listings_lag(store: MemoryStore) -> None:
    store.lag_seconds = 0.1


@pytest.mark.parametrize("change", [fails_often, an_hour_ahead, listings_lag])
def test_errors_a_wrong_clock_and_late_listings_change_no_bit(
    change: Callable[[MemoryStore], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.bucket.store._FIRST_PAUSE_SECONDS", 0.001)
    assert trained(Faults(change)) == trained_locally()


def test_a_store_that_overwrites_where_it_must_create_is_refused_at_the_start() -> None:
    def overwrites(store: MemoryStore) -> None:
        store.overwrites = True

    with pytest.raises(EngineError, match="overwrites an object that it was asked to create only if there is none"):
        LoopbackBucket(1, store=Faults(overwrites))


def test_a_store_that_does_not_answer_is_told_as_such() -> None:
    def silent(store: MemoryStore) -> None:
        def before(request: str, name: str) -> None:
            raise StoreUnavailable("connection refused")

        store.before = before

    with pytest.raises(EngineError, match="the bucket cannot be used: connection refused"):
        LoopbackBucket(1, store=Faults(silent), timeout_seconds=0.1)


# What other members have written


def test_data_that_was_cut_is_in_no_mean_and_all_get_the_exact_one_of_the_others() -> None:
    def cut(name: str, data: bytes) -> bytes:
        return data[: len(data) // 2] if "/data/1-" in name else data

    def change(store: MemoryStore) -> None:
        store.alter = cut

    with workers(3, Faults(change), late_seconds=0.1) as world:
        for result in rounds_of(world):
            assert result.contributors == (0, 2)
            assert result.refused == {1: "its data in the bucket is not what it has posted"}
            assert decoded(result) == plain_mean(0, 2).tolist()
        assert {fields["member"] for fields in told(world, "unusable_data")} == {1}


def test_a_verdict_on_data_that_is_there_is_followed_by_all_so_that_they_agree() -> None:
    with workers(2) as world:
        forged = encode(records.MeanRange(0, (), records.hashlib.sha256().digest(), unusable=1))
        name = f"{round_prefix(RoundKey(0, 0))}mean/1"
        world._store.objects.by_name[name] = (len(forged).to_bytes(4, "little") + forged, time.time())
        assert [result.contributors for result in rounds_of(world)] == [(0,), (0,)]
        assert {(each["member"], each["told_by"]) for each in told(world, "unusable_data")} == {(1, 0)}


@pytest.mark.parametrize("kind", ["garbage", "wrong"])
def test_a_range_of_a_mean_that_is_false_is_computed_anew_and_replaced(kind: str) -> None:
    """`wrong`: all of it, with the digest of what it is: it is told from the contributions alone."""

    def alter(name: str, data: bytes) -> bytes:
        if "/mean/1" not in name or worlds[0].engines[1]._store is not liar():
            return data
        if kind == "garbage":
            return data[:-1] + bytes([data[-1] ^ 1])
        head, content = records.split_mean(data, len(data) - 4 - int.from_bytes(data[:4], "little"))
        other = bytes(byte ^ 1 for byte in content)
        return records.join_mean(replace_head(head, other), other)

    def replace_head(head: records.MeanRange, content: bytes) -> records.MeanRange:
        digest = records.hashlib.sha256(content).digest()
        return records.MeanRange(head.author, head.comparison, digest)

    def liar() -> MemoryStore:
        return faults.stores[1]

    worlds: list[LoopbackBucket] = []
    faults = Faults()
    with workers(2, faults) as world:
        worlds.append(world)
        liar().alter = alter
        first, _ = rounds_of(world)
        assert decoded(first) == plain_mean(0, 1).tolist()
        falsehoods = told(world, "false_range")
        assert falsehoods and {each["range"] for each in falsehoods} == {1}
        if kind == "wrong":
            assert falsehoods[0]["member"] == 1
        content = faults.objects.by_name[f"{round_prefix(RoundKey(0, 0))}mean/1"][0]
        rows = sum(len(chunk) for chunk in RoundPlan.ranges(_plan(faults))[1])
        assert records.split_mean(content, rows * codec("fp32").part_bytes(1024))[0].author == 0


def _plan(faults: Faults) -> RoundPlan:
    return records.decode(faults.objects.by_name[f"{round_prefix(RoundKey(0, 0))}plan"][0], RoundPlan)


def test_a_post_that_cannot_be_read_or_is_of_another_round_is_passed_over_and_told() -> None:
    faults = Faults()
    with workers(2, faults) as world:
        prefix = round_prefix(RoundKey(0, 0))
        faults.objects.by_name[f"{prefix}post/7"] = (b"garbage", time.time())
        faults.objects.by_name[f"{prefix}post/8"] = (encode(post_of(8, RoundKey(5, 0))), time.time())
        assert all(result.contributors == (0, 1) for result in rounds_of(world))
        assert {each["member"] for each in told(world, "malformed_post")} == {7, 8}


def test_a_plan_that_cannot_be_read_fails_its_round_for_all_and_the_next_round_and_joiners_go_on() -> None:
    faults = Faults()
    with workers(2, faults) as world:
        name = f"{round_prefix(RoundKey(0, 0))}plan"

        def spoil(engine: Engine) -> str:
            pending = engine.start_round(RoundKey(0, 0), contribution(engine), 60.0)
            return message(pending.wait, RoundFailed)

        def before(request: str, wanted: str) -> None:
            if request == "create" and wanted == name:
                faults.objects.by_name.setdefault(name, (b"garbage", time.time()))

        for store in faults.stores:
            store.before = before
        assert all("its plan cannot be read" in reason for reason in together(world.engines, spoil))
        assert all(decoded(result) == plain_mean(0, 1).tolist() for result in rounds_of(world, 1))
        joiner = world.add(2)
        state = joiner.fetch_state()
        assert state is not None and [key.sequence for key, _ in state.means] == [1]
        assert state.numbers["sequence"] == 2


# Workers that are late, or gone


def test_a_round_that_a_worker_gives_up_is_closed_so_that_its_work_is_in_no_mean_that_it_does_not_get() -> None:
    faults = Faults()
    with workers(1, faults) as world:
        (engine,) = world.engines
        (store,) = faults.stores

        def before(request: str, name: str) -> None:
            if name.startswith("rounds/") and not name.endswith("post/0") and "/data/" not in name:
                raise StoreUnavailable("the network is gone")

        world.engines[0]._node._settings = replace(engine.settings, timeout_seconds=0.5)
        store.before = lambda request, name: before(request, name) if posted(faults) else None
        pending = engine.start_round(RoundKey(0, 0), contribution(engine), 0.1)
        assert "the bucket cannot be reached" in message(pending.wait, RoundFailed)
        store.before = lambda _request, _name: None
        engine._node._settings = engine.settings
        take_state(engine, sequence=0)
        assert _plan(faults).posts == (), "it has posted, and no later plan can have that post"
        assert average(engine, 1).contributors == (0,)


def posted(faults: Faults) -> bool:
    return any(name.endswith("post/0") for name in faults.objects.by_name)


def test_a_worker_that_slept_while_its_round_was_removed_takes_over_the_state_instead_of_a_round_alone() -> None:
    faults = Faults()
    with workers(2, faults, state_rounds=1, lost_seconds=0.5) as world:
        first, sleeper = world.engines

        def before(request: str, name: str) -> None:
            raise StoreUnavailable("asleep")

        faults.stores[1].before = before
        wait_until(lambda: first.roster == (0,))
        for sequence in range(5):
            take_state(first, sequence=sequence)
            average(first, sequence)
            wait_until(lambda: first._node.states.newest == sequence)  # noqa: B023 - called at once
        assert not any(name.startswith("rounds/0000000000") for name in faults.objects.by_name)
        faults.stores[1].before = lambda _request, _name: None
        failure = message(lambda: average(sleeper, 0), RoundFailed)
        assert "the others ended it without this worker" in failure
        state = sleeper.fetch_state()
        assert state is not None and state.tensors and state.numbers["sequence"] == 5


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


def test_a_round_left_open_behind_others_is_closed_by_a_joiner_which_then_has_all_means() -> None:
    faults = Faults()
    with workers(1, faults) as world:
        (engine,) = world.engines
        average(engine, 0)
        average(engine, 2)  # as after a round that failed, and whose worker died before it closed it
        state = world.add(1).fetch_state()
        assert state is not None and state.numbers["sequence"] == 3
        assert [key.sequence for key, _ in state.means] == [0, 2]


def test_a_state_whose_writer_died_is_written_by_another_and_what_it_left_is_removed() -> None:
    faults = Faults()
    with workers(1, faults, state_rounds=1) as world:
        (engine,) = world.engines
        left = ["states/0000000001/claim", "states/0000000001/tensors-0000000000000000"]
        for name in left:
            faults.objects.by_name[name] = (b"", time.time())
        for sequence in range(4):
            take_state(engine, sequence=sequence)
            average(engine, sequence)
            if sequence != 1:
                wait_until(lambda: engine._node.states.newest == sequence)  # noqa: B023
        assert f"states/{1:010d}/record" not in faults.objects.by_name
        wait_until(lambda: not any(name in faults.objects.by_name for name in left))


def test_two_workers_at_once_get_different_numbers_and_the_same_worker_its_own_again() -> None:
    with LoopbackBucket(0, store=Faults()) as world:
        engines = together(range(4), world.add)
        assert sorted(engine.worker for engine in engines) == [0, 1, 2, 3]
        number = engines[2].worker
        engines[2].close()
        assert world.add(2).worker == number


def test_workers_that_may_plan_at_the_same_moment_follow_one_plan() -> None:
    with workers(4) as world:
        for sequence in range(5):
            digests = {result.mean_digest for result in rounds_of(world, sequence)}
            assert len(digests) == 1


def test_a_worker_with_a_damaged_number_file_is_told_which_file_it_is() -> None:
    with LoopbackBucket(1, store=Faults()) as world:
        world.engines[0].close()
        path = world.folder / "machine-0" / "worker-0.json"
        path.write_text("[]")
        assert str(path) in message(lambda: world.add(0), EngineError)


def test_two_processes_cannot_be_the_same_worker() -> None:
    """A lock belongs to an open file, and so holds within a process too."""
    with LoopbackBucket(1, store=Faults()) as world:
        assert "another process is worker 'worker-0' of" in message(lambda: world.add(0), ConfigError)


@pytest.mark.parametrize("removed", [False, True])
def test_data_that_is_gone_is_left_out_but_not_if_the_whole_round_was_removed_meanwhile(removed: bool) -> None:
    """A worker may stop for so long that its round is removed while it is in it: it must not end it alone then."""
    faults = Faults()
    with workers(1, faults, late_seconds=0.1) as world:
        key = RoundKey(0, 0)
        prefix = round_prefix(key)
        faults.objects.by_name[f"{prefix}post/5"] = (encode(post_of(5, key)), time.time())

        def before(request: str, name: str) -> None:
            if removed and request == "read" and name.startswith(f"{prefix}data/5"):
                faults.objects.by_name.pop(f"{prefix}plan", None)

        faults.stores[0].before = before
        (engine,) = world.engines
        if removed:
            with pytest.raises(RoundFailed, match="round 0 was removed") as caught:
                average(engine)
            assert caught.value.resync and not told(world, "unusable_data")
            assert not any("/mean" in name for name in faults.objects.by_name)
        else:
            assert average(engine).contributors == (0,)
            assert told(world, "unusable_data") == [{"member": 5, "round": 0, "told_by": 0}]


def test_a_worker_that_slept_after_its_post_until_its_round_was_removed_does_not_plan_it_alone() -> None:
    faults = Faults()
    with workers(1, faults) as world:
        prefix = round_prefix(RoundKey(0, 0))

        def before(request: str, name: str) -> None:
            if request == "list" and name == prefix:  # what has happened while it slept
                for each in [each for each in faults.objects.by_name if each.startswith(prefix)]:
                    del faults.objects.by_name[each]
                faults.objects.by_name["states/0000000009/record"] = (b"", time.time())

        faults.stores[0].before = before
        with pytest.raises(RoundFailed, match="round 0 ended long ago, while this worker slept") as caught:
            average(world.engines[0])
        assert caught.value.resync
        assert f"{prefix}plan" not in faults.objects.by_name
