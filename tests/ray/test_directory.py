from darts_server.ray.directory import EXPIRE_SECONDS, Directory


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_servers_are_listed_when_they_answer_in_the_order_of_their_numbers() -> None:
    directory = Directory()
    assert [directory.announce(name, None, None) for name in "abc"] == [0, 1, 2]
    assert directory.urls() == []
    directory.announce("c", "http://c", 2)
    directory.announce("a", "http://a", 0)
    assert directory.urls() == ["http://a", "http://c"]


def test_a_replica_gets_the_number_of_one_that_has_left_and_of_no_other() -> None:
    directory = Directory()
    for name in "abc":
        directory.announce(name, f"http://{name}", None)
    directory.leave("b")
    assert directory.urls() == ["http://a", "http://c"]
    assert directory.announce("d", None, None) == 1
    assert directory.announce("e", None, None) == 3
    directory.leave("unknown")


def test_a_replica_that_no_longer_announces_itself_is_gone_and_its_number_is_free() -> None:
    clock = Clock()
    directory = Directory(clock)
    for name in "ab":
        directory.announce(name, f"http://{name}", None)
    clock.now = EXPIRE_SECONDS
    directory.announce("b", "http://b", 1)
    assert directory.urls() == ["http://a", "http://b"]
    clock.now += 0.001
    assert directory.urls() == ["http://b"]
    assert directory.announce("c", None, None) == 0


def test_after_its_restart_replicas_keep_the_numbers_that_they_have() -> None:
    directory = Directory()
    assert directory.announce("b", "http://b", 1) == 1
    assert directory.announce("new", None, None) == 0
    assert directory.announce("c", "http://c", 2) == 2
    assert directory.urls() == ["http://b", "http://c"]
