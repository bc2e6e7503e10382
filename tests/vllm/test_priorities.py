from random import Random

from darts_server.vllm.ranks import LEVEL, combined


def test_callers_priorities_come_first_and_the_order_decides_among_equal_ones() -> None:
    rng = Random(1)
    requests = [(rng.randint(-3, 3), rng.uniform(-1e6, 1e6)) for _ in range(500)]
    assert sorted(requests, key=lambda each: combined(*each)) == sorted(requests)
    assert combined(0, 1.5) == 1500


def test_what_is_out_of_range_is_first_or_last_and_has_63_bits() -> None:
    assert combined(2**63 - 1, 1e30) == combined(2**40, 1e20) < 2**63
    assert combined(-(2**63), -1e30) >= -(2**63)
    assert combined(0, 1e30) - combined(0, -1e30) < LEVEL
