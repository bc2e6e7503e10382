"""The grammar of --verifier."""

import os
from pathlib import Path

import pytest

from darts_server.exceptions import InvalidSetting
from darts_server.verify.specs import Kind, Spec, parse_specs

CODE = str(Path(__file__).with_name("user_code.py"))


def parse(text: str) -> Spec:
    [spec] = parse_specs([text])
    assert spec.text == text
    return spec


@pytest.mark.parametrize(
    ("text", "name", "kind", "weight", "target"),
    [
        ("boxed", "boxed", Kind.BOXED, 1, ""),
        ("math=0.8*boxed", "math", Kind.BOXED, 0.8, ""),
        ("-.5*math-verify", "math-verify", Kind.MATH_VERIFY, -0.5, ""),
        (r"regex:= (\d+)", "regex", Kind.REGEX, 1, r"= (\d+)"),
        ("n=2*regex:a=(1*)", "n", Kind.REGEX, 2, "a=(1*)"),
        ("http://rm:5000/get_reward", "openrlhf", Kind.OPENRLHF, 1, "http://rm:5000/get_reward"),
        ("https://gym/verify", "nemo-gym", Kind.NEMO_GYM, 1, "https://gym/verify"),
        ("rm=slime+http://rm/?a=1*2", "rm", Kind.SLIME, 1, "http://rm/?a=1*2"),
        ("openrlhf+http://rm/verify", "openrlhf", Kind.OPENRLHF, 1, "http://rm/verify"),
        (f"{CODE}:compute_score", "compute_score", Kind.FUNCTION, 1, CODE),
        (f"x.y-z=3*trl:{CODE}:f", "x.y-z", Kind.TRL, 3, CODE),
        (f"verl:{CODE}:f", "f", Kind.VERL, 1, CODE),
    ],
)
def test_a_verifier_has_a_name_a_weight_and_a_kind(
    text: str, name: str, kind: Kind, weight: float, target: str
) -> None:
    spec = parse(text)
    assert (spec.name, spec.kind, spec.weight, spec.target) == (name, kind, weight, target)


def test_the_path_of_a_file_may_be_relative() -> None:
    assert parse(f"{os.path.relpath(CODE)}:f").target == CODE


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must not be empty"),
        ("boxes", "'boxes' is no verifier; give FILE.py:FUNCTION"),
        ("math=", "is no verifier"),
        ("two*boxed", r"'two\*boxed' is no verifier"),
        ("regex:(", "pattern is not accepted by RE2"),
        ("regex:a", "exactly one group"),
        ("missing.py:f", "missing.py is not a file; give the path"),
        (CODE, "is no verifier; give FILE.py:FUNCTION"),
        ("http://rm", r"write openrlhf\+http://rm, nemo-gym\+http://rm or slime\+http://rm"),
        ("verl+http://rm", "is no verifier"),
        ("slime+http://rm:port/", "is not a valid URL"),
    ],
)
def test_a_wrong_verifier_is_an_error_that_names_the_remedy(text: str, complaint: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^--verifier.*{complaint}"):
        parse(text)


def test_names_are_unique() -> None:
    with pytest.raises(InvalidSetting, match="named boxed too; give each a name, as NAME=SPEC"):
        parse_specs(["boxed", "boxed"])
    assert [spec.name for spec in parse_specs(["boxed", "other=boxed"])] == ["boxed", "other"]
