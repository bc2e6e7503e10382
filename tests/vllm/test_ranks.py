from hypothesis import given
from hypothesis import strategies as st

from darts_server.vllm.ranks import Ranks


def test_candidates_of_a_group_share_an_engine_and_groups_spread() -> None:
    ranks = Ranks(3)
    assert [ranks.enter("a") for _ in range(12)] == [0] * 12
    assert [ranks.enter("b") for _ in range(4)] == [1] * 4
    assert [ranks.enter("c") for _ in range(12)] == [2] * 12
    assert ranks.enter("d") == 1
    assert ranks.enter("a") == 0, "a replacement goes to its siblings"


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200))
def test_running_candidates_are_counted_and_ended_groups_forgotten(moves: list[tuple[int, bool]]) -> None:
    ranks, running = Ranks(3), dict[str, list[int]]()
    for number, starts in moves:
        group = f"g{number}"
        if starts:
            loads = [sum(rank == r for mine in running.values() for rank in mine) for r in range(3)]
            rank = ranks.enter(group)
            assert rank == (running[group][0] if running.get(group) else loads.index(min(loads)))
            running.setdefault(group, []).append(rank)
        elif running.get(group):
            running[group].pop()
            ranks.leave(group)
