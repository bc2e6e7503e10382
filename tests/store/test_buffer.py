"""The memory between callers and file stays bounded and in order."""

from darts_server.store.buffer import Recent, Unwritten


def test_recent_reads_are_bounded_and_the_oldest_goes_first() -> None:
    recent = Recent(entries=2, seconds=10)
    for now, key in enumerate("abac"):
        recent.keep(("prompt", key), None if key == "c" else key, now)
    assert recent.get(("prompt", "a"), now=3)
    assert recent.get(("prompt", "b"), now=3) is None
    absent = recent.get(("prompt", "c"), now=3)
    assert absent is not None
    assert absent.text is None


def test_what_is_over_takes_no_room() -> None:
    recent = Recent(entries=100, seconds=0.5)
    for now in range(50):
        recent.keep(("prompt", str(now)), "{}", now)
    assert len(recent) == 1


def test_a_read_is_over_after_its_time_however_often_it_was_used() -> None:
    recent = Recent(entries=2, seconds=0.5)
    recent.keep(("prompt", "a"), "{}", now=0)
    assert recent.get(("prompt", "a"), now=0.49)
    assert recent.get(("prompt", "a"), now=0.5) is None


def test_what_could_not_be_written_waits_again_under_what_is_newer_and_keeps_its_generation() -> None:
    unwritten = Unwritten()
    unwritten.begin(1)
    for key in ("a", "b"):
        unwritten.put(("prompt", key), "old")
    assert unwritten.take() == ({("prompt", "a"): "old", ("prompt", "b"): "old"}, 1)
    assert unwritten.get(("prompt", "a")) == "old"  # on its way is not written
    unwritten.begin(2)
    unwritten.put(("prompt", "a"), "new")
    assert unwritten.rows("prompt") == [("prompt", "a", "new"), ("prompt", "b", "old")]
    unwritten.take_back()
    assert unwritten.take() == ({("prompt", "a"): "new", ("prompt", "b"): "old"}, 1)
    unwritten.written()
    assert unwritten.keys("prompt") == []
    assert not unwritten.waiting
