"""What the benchmark of the starting order computes."""

from benchmarks.starting_order import ARRIVAL, LONGEST_FIRST, ONE_BATCH, Rollout, Workload, report


def test_all_ways_have_the_same_prompts_and_seeds_in_the_same_order() -> None:
    workload = Workload([f"{number}a+1>" for number in range(5)])
    sent = {way: workload.batches(way, 3) for way in (ARRIVAL, LONGEST_FIRST, ONE_BATCH)}
    assert sent[ARRIVAL] == sent[LONGEST_FIRST]
    assert [prompt for each in sent[ARRIVAL] for prompt in each["prompts"]] == sent[ONE_BATCH][0]["prompts"]
    assert {each["sampling"]["seed"] for way in sent for each in sent[way]} == {300}
    assert workload.batches(ARRIVAL, 4) != sent[ARRIVAL]


def test_no_order_is_shorter_than_the_longest_candidate_or_all_slots_busy() -> None:
    assert Rollout(1.0, 30, [4, 4, 20]).least_steps(4) == 20
    assert Rollout(1.0, 30, [4, 4, 20]).least_steps(1) == 28


def test_the_table_has_ratios_to_the_order_of_arrival() -> None:
    found = {ARRIVAL: [Rollout(2.0, 40, [10] * 4)] * 2, LONGEST_FIRST: [Rollout(1.0, 20, [10] * 4)] * 2}
    first, second = report(found, 2).splitlines()[2:]
    assert first == f"| {ARRIVAL} | 40 | 2.00 | 1.000 ± 0.000 | 40 | 1.000 ± 0.000 | 2.000 ± 0.000 |"
    assert second == f"| {LONGEST_FIRST} | 40 | 1.00 | 0.500 ± 0.000 | 20 | 0.500 ± 0.000 | 1.000 ± 0.000 |"
