"""The write buffer and the read cache."""

from darts_server.store.buffer import ReadCache, WriteBuffer


def test_the_cache_is_bounded_and_drops_the_oldest_read() -> None:
    cache = ReadCache(entries=2, seconds=10)
    for now, key in enumerate("abac"):
        cache.put(("prompt", key), None if key == "c" else key, now)
    assert cache.get(("prompt", "a"), now=3)
    assert cache.get(("prompt", "b"), now=3) is None
    absent = cache.get(("prompt", "c"), now=3)
    assert absent is not None
    assert absent.text is None


def test_expired_reads_are_dropped() -> None:
    cache = ReadCache(entries=100, seconds=0.5)
    for now in range(50):
        cache.put(("prompt", str(now)), "{}", now)
    assert len(cache) == 1


def test_a_read_expires_however_often_it_was_used() -> None:
    cache = ReadCache(entries=2, seconds=0.5)
    cache.put(("prompt", "a"), "{}", now=0)
    assert cache.get(("prompt", "a"), now=0.49)
    assert cache.get(("prompt", "a"), now=0.5) is None


def test_a_cancelled_write_is_pending_again_below_newer_texts_with_its_generation() -> None:
    buffer = WriteBuffer()
    buffer.begin(1)
    for key in ("a", "b"):
        buffer.put(("prompt", key), "old")
    assert buffer.begin_write() == ({("prompt", "a"): "old", ("prompt", "b"): "old"}, 1)
    assert buffer.get(("prompt", "a")) == "old"  # in flight is still readable
    buffer.begin(2)
    buffer.put(("prompt", "a"), "new")
    assert buffer.rows("prompt") == [("prompt", "a", "new"), ("prompt", "b", "old")]
    buffer.cancel_write()
    assert buffer.begin_write() == ({("prompt", "a"): "new", ("prompt", "b"): "old"}, 1)
    buffer.end_write()
    assert buffer.keys("prompt") == []
    assert not buffer.has_pending
