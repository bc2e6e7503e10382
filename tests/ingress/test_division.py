"""How the prompts of a batch are divided among replicas."""

from hypothesis import given
from hypothesis import strategies as st

from darts_server.ingress.batches.division import SLACK, divide, share_budget


@given(
    st.lists(st.floats(1, 1000), min_size=1, max_size=30),
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 500), min_size=1),
)
def test_every_prompt_is_in_one_part_and_loads_are_as_even_as_the_longest_allows(
    works: list[float], loads: dict[str, float]
) -> None:
    parts = divide(works, {}, {}, loads)
    assert sorted(number for part in parts.values() for number in part) == list(range(len(works)))
    ends = {name: load + sum(works[n] for n in parts.get(name, ())) for name, load in loads.items()}
    assert max(ends[name] for name in parts) <= min(ends.values()) + max(works) + 1e-6


@given(
    st.lists(st.floats(1, 100), min_size=1, max_size=30),
    st.dictionaries(st.integers(0, 29), st.sampled_from("abc")),
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 500), min_size=3),
)
def test_prompts_stay_where_they_were_as_far_as_that_replica_has_no_more_than_its_share(
    works: list[float], homes: dict[int, str], loads: dict[str, float]
) -> None:
    parts = divide(works, {}, homes, loads)
    assert sorted(number for part in parts.values() for number in part) == list(range(len(works)))
    share = (sum(works) + sum(loads.values())) / len(loads)
    for name, part in parts.items():
        assert loads[name] + sum(works[number] for number in part) <= max((1 + SLACK) * share, share + max(works)) * (
            1 + 1e-9
        )
    moved = [number for name, part in parts.items() for number in part if homes.get(number, name) != name]
    for number in moved:
        home = homes[number]
        longer = [n for n in parts.get(home, ()) if works[n] >= works[number]]
        assert loads[home] + sum(works[n] for n in longer) + works[number] > (1 + SLACK) * share * (1 - 1e-9)


@given(st.integers(1, 20), st.integers(0, 19), st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_shares_of_a_budget_allow_each_prompt_what_the_whole_allows(low: int, more: int, sizes: list[int]) -> None:
    prompts = sum(sizes)
    budget = low * prompts + more * prompts // 20
    shares = share_budget(budget, sizes)
    assert sum(shares) == budget
    high = -(-budget // prompts)
    assert all(low * size <= share <= high * size for share, size in zip(shares, sizes, strict=True))
