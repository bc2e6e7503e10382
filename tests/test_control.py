from collections.abc import Mapping

import pytest

from darts_server.control import Configuration, Control, configuration
from darts_server.exceptions import InvalidRequest
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.plan import Limits
from darts_server.settings import load


class Heard:
    """Stands in for the rollout room."""

    def __init__(self) -> None:
        self.told: list[Configuration] = []

    def configure(self, policies: Mapping[str, Shaping], default_policy: str, limits: Limits) -> None:
        self.told.append(Configuration(policies, default_policy, limits))


def test_settings_become_policies_and_limits() -> None:
    flags = {"redundancy": "2", "num_longest": "3", "tail": "longest", "group_size": "16", "policy": "off"}
    policies, default, limits = configuration(load(flags, None))
    assert (policies["uniform"].redundancy, policies["uniform"].num_longest) == (2, 3)
    assert policies["uniform"].tail is Tail.LONGEST
    assert [policies[name].adaptive for name in ("uniform", "darts")] == [False, True]
    assert (default, limits) == ("off", Limits(1024, 16))


def test_a_change_is_heard_with_all_that_is_in_force() -> None:
    heard, control = Heard(), Control(load({"num_longest": "2"}, None))
    control.drive(heard)
    told = control.change({"redundancy": 3.0, "policy": "off"})
    assert told == control.current()
    assert heard.told == [control.configuration()]
    [(policies, default, _)] = heard.told
    assert (policies["uniform"].redundancy, policies["uniform"].num_longest, default) == (3, 2, "off")


def test_a_refused_change_is_not_heard_and_changes_nothing() -> None:
    heard, control = Heard(), Control(load({}, None))
    control.drive(heard)
    before = control.current()
    with pytest.raises(InvalidRequest):
        control.change({"redundancy": 3.0, "num_longest": -1})
    assert (heard.told, control.current()) == ([], before)


def test_before_the_engine_is_there_a_change_waits_for_it() -> None:
    control = Control(load({}, None))
    control.change({"policy": "off"})
    assert control.configuration().default_policy == "off"


def test_settings_become_a_way_to_prune_and_a_change_of_them_another() -> None:
    control = Control(load({"keep_ratio": "0.4", "survival": "aimed", "refill": "true"}, None))
    arrol = control.configuration().policies["arrol"]
    assert arrol.pruning == Pruning(keep_ratio=0.4, aimed=True)
    assert arrol.refill
    assert [control.prunes(name) for name in ("arrol", "darts+arrol", "darts", "off", "none")] == [
        True,
        True,
        *[False] * 3,
    ]
    control.change({"keep_ratio": 0.25, "min_survival": 0.2})
    changed = control.configuration().policies["arrol"]
    assert changed.pruning == Pruning(keep_ratio=0.25, min_survival=0.2, aimed=True)
    assert changed.candidates(8) == 32
