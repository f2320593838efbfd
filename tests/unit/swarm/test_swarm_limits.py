"""Token buckets and LRU caches: bounds that no outsider can exceed."""

from hypothesis import given
from hypothesis import strategies as st

from diloco.swarm.network.limits import LruCache, TokenBucket


def test_a_token_bucket_never_holds_more_than_its_burst() -> None:
    bucket = TokenBucket.full(3, 0.5, 0.0)
    assert [bucket.take(1e6) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not bucket.take(0.0) and not bucket.take(1.0) and bucket.take(2.0)  # the clock was set back


@given(st.lists(st.floats(-3, 2), max_size=60))
def test_a_token_bucket_is_never_exceeded_however_the_clock_goes(steps: list[float]) -> None:
    bucket = TokenBucket.full(3, 0.5, 0.0)
    now = 0.0
    taken = 0
    gone = 0.0
    for step in steps:
        now = now + step
        gone = gone + max(0.0, step)
        taken += bucket.take(now)
        assert taken <= 3 + 0.5 * gone + 1e-6


def test_the_least_recently_used_makes_room() -> None:
    cache: LruCache[int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert list(cache) == ["a", "c"] and "b" not in cache and cache.get("b") is None
    cache.drop("a")
    cache.drop("nobody")
    assert len(cache) == 1
