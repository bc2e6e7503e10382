from dataclasses import replace

from darts_server.caller import Caller
from darts_server.rollout.observers.provenance import Provenance
from tests.rollout.learned.test_prompts import FINISHED, record


def add(
    provenance: Provenance, group_id: str, *members: str, owner: str | None = None, candidates: int = len(FINISHED)
) -> None:
    """Add a group that answered these requests."""
    ended = record(*FINISHED[:1] * candidates)
    provenance.group_ended(replace(ended, group_id=group_id, request_ids=members, owner=owner))


def found(provenance: Provenance, name: str) -> list[str]:
    return [each.group_id for each in provenance.find(name, Caller().may_see)]


def test_a_group_is_found_by_its_id_and_by_its_responses_id() -> None:
    provenance = Provenance()
    for group_id in ("cmpl-a-10", "cmpl-a-2", "cmpl-b-0", "chatcmpl-c"):
        add(provenance, group_id)
    assert found(provenance, "cmpl-a-2") == ["cmpl-a-2"]
    assert found(provenance, "cmpl-a") == ["cmpl-a-2", "cmpl-a-10"]
    assert found(provenance, "chatcmpl-c") == ["chatcmpl-c"]
    assert found(provenance, "cmpl") == []


def test_a_group_is_found_by_each_request_that_it_answered_and_by_its_callers_name_for_it() -> None:
    provenance = Provenance()
    add(provenance, "group-cmpl-a-0", "step 3", "cmpl-a-0", "cmpl-b-0", "chatcmpl-c")
    add(provenance, "group-cmpl-a-1", "cmpl-a-1", "cmpl-d-0")
    for name in ("group-cmpl-a-0", "step 3", "cmpl-a-0", "cmpl-b-0", "cmpl-b", "chatcmpl-c"):
        assert found(provenance, name) == ["group-cmpl-a-0"], name
    for name in ("group-cmpl-a", "cmpl-a"):
        assert found(provenance, name) == ["group-cmpl-a-0", "group-cmpl-a-1"]
    assert found(provenance, "step") == []


def test_groups_of_a_response_are_in_the_order_of_its_own_prompts() -> None:
    # Its prompts joined groups that others began, in another order.
    provenance = Provenance()
    add(provenance, "group-cmpl-x-0", "cmpl-x-0", "cmpl-r-2")
    add(provenance, "group-cmpl-y-7", "cmpl-y-7", "cmpl-r-0", "cmpl-r-10")
    add(provenance, "group-cmpl-x-1", "cmpl-x-1", "cmpl-r-1")
    assert found(provenance, "cmpl-r") == ["group-cmpl-y-7", "group-cmpl-x-1", "group-cmpl-x-0"]


def test_a_reused_name_finds_all_its_kept_groups_oldest_first() -> None:
    provenance = Provenance(kept=3)
    for number in range(4):
        add(provenance, f"group-cmpl-{9 - number}-0", "prompt-7", f"cmpl-{9 - number}-0")
    assert found(provenance, "prompt-7") == ["group-cmpl-8-0", "group-cmpl-7-0", "group-cmpl-6-0"]


def test_a_dropped_group_is_found_by_none_of_its_names() -> None:
    provenance = Provenance(kept=1)
    add(provenance, "group-cmpl-a-0", "step 3", "cmpl-a-0", "cmpl-a-0", "cmpl-a-1")
    add(provenance, "group-cmpl-b-0", "step 3", "cmpl-b-0")
    assert found(provenance, "step 3") == ["group-cmpl-b-0"]
    assert provenance._keys_by_name.keys() == {"step 3", "cmpl-b-0", "cmpl-b", "group-cmpl-b-0", "group-cmpl-b"}


def test_a_group_is_found_by_its_owner_and_by_admins_alone() -> None:
    provenance, owners = Provenance(), ("one", "other", None)
    for owner in owners:
        add(provenance, "cmpl-a-0", owner=owner)
    for owner in owners:
        for name in ("cmpl-a-0", "cmpl-a"):
            assert [each.owner for each in provenance.find(name, Caller(owner).may_see)] == [owner]
    assert provenance.find("cmpl-a-0", Caller("third").may_see) == []
    admin = Caller("root", is_admin=True)
    assert [each.owner for each in provenance.find("cmpl-a-0", admin.may_see)] == [None]  # the newest
    assert len(provenance.find("cmpl-a", admin.may_see)) == 3


def test_groups_of_one_caller_push_out_none_of_another() -> None:
    by_groups, by_candidates = Provenance(kept=10), Provenance(kept_candidates=60)
    for provenance, candidates in ((by_groups, 1), (by_candidates, 10)):
        add(provenance, "cmpl-a", owner="victim")
        for number in range(30):
            add(provenance, f"cmpl-b-{number}", owner="flooder", candidates=candidates)
        assert provenance.find("cmpl-a", Caller("victim").may_see)
        kept = [each.group_id for each in provenance.find("cmpl-b", Caller("flooder").may_see)]
        assert kept == [f"cmpl-b-{number}" for number in range(30 - len(kept), 30)]
        assert len(kept) == (9 if provenance is by_groups else 5)


def test_the_groups_of_the_newest_candidates_are_kept() -> None:
    provenance, kept = Provenance(kept_candidates=10), []
    for number, candidates in enumerate((4, 4, 4, 1, 1, 30)):
        add(provenance, f"g{number}", candidates=candidates)
        kept.append([place for place in range(number + 1) if found(provenance, f"g{place}")])
    assert kept == [[0], [0, 1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [5]]
