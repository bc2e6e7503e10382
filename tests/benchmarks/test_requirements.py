"""Which packages a bundle needs, and what happens where not all can be satisfied."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu.packing.requirements import Demand, Plan, Resolver
from benchmarks.gpu.packing.target import Target, read_installed
from tests.benchmarks.shelf import Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def resolve(shelf: Shelf, *roots: str, installed: str = "", left_out: str = "", kept: str = "") -> Plan:
    target = Target("3.12", "2.35", read_installed(installed))
    reasons = [dict.fromkeys(names.split(), "a reason") for names in (left_out, kept)]
    return Resolver(target, shelf.newest, *reasons).resolve([Demand(Requirement(root), "pack") for root in roots])


def versions(plan: Plan) -> dict[str, str]:
    return {name: candidate.version for name, candidate in plan.chosen.items()}


def test_what_the_target_has_is_neither_bundled_nor_looked_up(shelf: Shelf) -> None:
    shelf.put("vllm", "0.26.0", "torch==2.11.0", "msgspec", "Numpy>=2")
    shelf.put("msgspec", "0.22", "numpy")
    plan = resolve(shelf, "vllm==0.26.0", installed="torch==2.11.0+cu130\nnumpy==2.5.2\n")
    assert versions(plan) == {"vllm": "0.26.0", "msgspec": "0.22"}
    assert shelf.asked == [["vllm==0.26.0"], ["msgspec"]]
    assert plan.conflicts == []


def test_the_newest_version_that_suits_everybody_is_taken(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "a", "b")
    shelf.put("a", "1", "c<3")
    shelf.put("b", "1", "c>1")
    for version in ("1", "2", "3"):
        shelf.put("c", version)
    assert versions(resolve(shelf, "vllm"))["c"] == "2"


def test_a_version_that_a_later_demand_rules_out_is_replaced_and_what_it_needed_goes(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "c", "a")
    shelf.put("a", "1", "c<2")
    shelf.put("c", "1")
    shelf.put("c", "2", "d")
    shelf.put("d", "1")
    assert versions(resolve(shelf, "vllm")) == {"vllm": "1", "a": "1", "c": "1"}


def test_who_is_further_from_the_roots_yields_to_a_pin(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "ffi==0.1.10", "grammar<1")
    shelf.put("ffi", "0.1.10")
    shelf.put("ffi", "0.1.11")
    shelf.put("grammar", "0.6", "ffi>=0.1.10")
    shelf.put("grammar", "0.7", "ffi>=0.1.11")
    shelf.put("grammar", "0.8", "ffi>=0.1.11")
    plan = resolve(shelf, "vllm")
    assert versions(plan) == {"vllm": "1", "ffi": "0.1.10", "grammar": "0.6"}
    assert plan.conflicts == []


def test_a_contradiction_that_no_version_solves_is_named(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "ffi==0.1.10", "grammar")
    shelf.put("ffi", "0.1.10")
    shelf.put("grammar", "0.7", "ffi>=0.1.11")
    plan = resolve(shelf, "vllm")
    assert versions(plan) == {"vllm": "1", "ffi": "0.1.10", "grammar": "0.7"}
    assert plan.conflicts == [
        "ffi: no wheel for this target satisfies ==0.1.10 (vllm); >=0.1.11 (grammar); the bundle has 0.1.10"
    ]


def test_a_package_that_the_registry_lacks_is_named_and_the_others_come(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "here", "nowhere", "there")
    shelf.put("here", "1")
    shelf.put("there", "1")
    plan = resolve(shelf, "vllm")
    assert sorted(plan.chosen) == ["here", "there", "vllm"]
    assert plan.conflicts == [
        "nowhere: no wheel for this target satisfies any version (vllm); the bundle has none",
    ]


def test_an_old_package_of_the_target_is_replaced(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "pydantic>=2.12")
    shelf.put("pydantic", "2.14")
    plan = resolve(shelf, "vllm", installed="pydantic==2.9")
    assert versions(plan)["pydantic"] == "2.14"
    assert plan.replaced == {"pydantic": "2.9 is there; asked for: >=2.12 (vllm)"}


def test_what_must_stay_stays_and_the_conflict_is_named(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "numpy<2.4")
    plan = resolve(shelf, "vllm", installed="numpy==2.5.2", kept="numpy")
    assert versions(plan) == {"vllm": "1"}
    assert plan.conflicts == ["numpy: the target's 2.5.2 stays, against <2.4 (vllm): a reason"]


def test_a_package_of_unknown_version_is_taken_to_do(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "rich>=10", "tqdm")
    plan = resolve(shelf, "vllm", installed="rich\ntqdm\n")
    assert versions(plan) == {"vllm": "1"}
    assert list(plan.assumed) == ["rich"]


def test_what_is_left_out_takes_its_own_needs_with_it(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "flashinfer==0.6", "rich")
    shelf.put("flashinfer", "0.6", "cutlass")
    plan = resolve(shelf, "vllm", installed="rich", left_out="flashinfer rich")
    assert versions(plan) == {"vllm": "1"}
    assert plan.left_out == {"flashinfer": "a reason"}  # rich is there


def test_markers_are_the_targets_and_extras_are_followed(shelf: Shelf) -> None:
    shelf.put("vllm", "1", "six; python_version > '3.11'", "win; sys_platform == 'win32'", "fastapi[standard]")
    shelf.put("fastapi", "1", "uvicorn; extra == 'standard'", "docs; extra == 'docs'")
    for name in ("six", "uvicorn"):
        shelf.put(name, "1")
    assert sorted(resolve(shelf, "vllm").chosen) == ["fastapi", "six", "uvicorn", "vllm"]


def test_package_lists_of_both_kinds_are_read() -> None:
    freeze = "# a comment\nTorch==2.11.0+cu130\nmy.pkg @ file:///wheels/my.whl\n-e git+https://host/x#egg=mine\nbare\n"
    assert read_installed(freeze) == {"torch": "2.11.0+cu130", "my-pkg": None, "mine": None, "bare": None}
    assert read_installed('[{"name": "Py_YAML", "version": "6.0"}]') == {"py-yaml": "6.0"}
    with pytest.raises(ValueError, match=r"line 2 is not of `pip freeze`: 'Package Version'"):
        read_installed("torch==1\nPackage Version\n")


def test_wheels_are_asked_for_by_the_target_s_python_and_c_library() -> None:
    options = Target("3.12", "2.28", {}).pip_options()
    assert options[options.index("--python-version") + 1] == "3.12"
    assert "manylinux_2_28_x86_64" in options
    assert "manylinux_2_29_x86_64" not in options
    assert "manylinux2014_x86_64" in options
