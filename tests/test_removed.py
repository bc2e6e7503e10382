"""What earlier versions had is refused with what to use instead: neither silently nor as if it had never been."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient

from darts_server.cli import USAGE_ERROR, main
from darts_server.control import Control
from darts_server.exceptions import InvalidRequest, InvalidSetting
from darts_server.removed import COMMANDS, FIELDS, PARAMETERS, ROUTES, SETTINGS, VALUES
from darts_server.settings import Settings, apply_patch, load, refuse_removed_flags
from darts_server.simulation.policies import NAMES, parse_policy
from darts_server.types import POLICIES, RequestOptions
from darts_server.weights.updates import Updates
from tests.http.serving import client

GONE = sorted(SETTINGS.keys() - Settings.model_fields.keys())
NAMES_GONE = [name.replace("*", "darts_cut") for name in VALUES["policy"]]


@pytest.mark.parametrize("form", ["--{} 1", "--{}=1"])
def test_flags_that_are_gone_say_what_to_use_instead(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [part for name in GONE for part in form.format(name.replace("_", "-")).split()]
    for command in ("serve", "doctor"):
        assert main([command, "model", *flags]) in (USAGE_ERROR, 1)
        written = capsys.readouterr()
        for name in GONE:
            assert f"--{name.replace('_', '-')} is gone; {SETTINGS[name]}" in written.err + written.out


def test_a_command_that_is_gone_says_what_to_use_instead(capsys: pytest.CaptureFixture[str]) -> None:
    for name, remedy in COMMANDS.items():
        assert main([name, "--replica", "http://127.0.0.1:8000"]) == USAGE_ERROR
        assert capsys.readouterr().err == f"darts-server: the command {name} is gone; {remedy}\n"


def test_flags_of_others_pass() -> None:
    refuse_removed_flags(["--max-model-len", "queue-prompts", "--queue-promptly", "-O3", "survival"])


@pytest.mark.parametrize("name", GONE)
def test_a_variable_and_a_key_of_the_file_that_are_gone_say_so_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "darts.toml"
    config.write_text(f"{name} = 1\n")
    with pytest.raises(InvalidSetting, match=f"{name} is gone; "):
        load({}, str(config))
    with pytest.raises(InvalidRequest, match="is gone; ") as refused:
        apply_patch(load({}, None), {name: 1})
    assert refused.value.field == name
    monkeypatch.setenv(f"darts_{name}", "")
    load({}, None)
    monkeypatch.setenv(f"darts_{name}", "1")
    with pytest.raises(InvalidSetting, match=f"darts_{name} is gone; "):
        load({}, None)


@pytest.mark.parametrize(("setting", "value"), [("budget", "utility"), *(("policy", name) for name in NAMES_GONE)])
def test_a_value_that_is_gone_says_what_to_use_instead(setting: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=f"--{setting} = {value} is gone; use "):
        load({setting: value}, None)
    with pytest.raises(InvalidRequest, match=f"'{value}' is gone; use ") as refused:
        apply_patch(load({}, None), {setting: value})
    assert refused.value.field == setting
    if setting == "policy":
        with pytest.raises(InvalidRequest, match=f"policy: '{value}' is gone; use "):
            Control(load({}, None)).planner.plan(8, RequestOptions(policy=value))
        with pytest.raises(InvalidSetting, match=f"--policies: {value} is gone; use "):
            parse_policy(f"{value},redundancy=2", 8)


def test_the_remedies_name_policies_that_there_are() -> None:
    assert not any(name in POLICIES for name in VALUES["policy"])
    assert list(Control(load({}, None)).planner.names()) == list(POLICIES)
    assert [name for name in POLICIES if name not in NAMES] == ["arrol", "darts+arrol"]
    policy = Control(load({}, None)).schema()["properties"]["policy"]  # type: ignore[index]
    assert policy["enum"] == list(POLICIES)
    assert all(f"{name}: {about}." in policy["description"] for name, about in POLICIES.items())


def test_the_page_of_policies_names_all_of_them() -> None:
    page = Path("docs/policies.md").read_text(encoding="utf-8")
    first_cells = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")}
    assert {f"`{name}`" for name in POLICIES} <= {cell.removesuffix(" (default)") for cell in first_cells}


@pytest.fixture(scope="module")
def here() -> Iterator[TestClient]:
    with client() as caller:
        yield caller


def test_routes_that_are_gone_are_not_found_and_say_what_to_use_instead(here: TestClient) -> None:
    for method, path in (
        ("POST", "/darts/v1/queue"),
        ("DELETE", "/darts/v1/queue/jobs/a/b"),
        ("POST", "/darts/v1/trajectories/group-1:0:abort"),
        ("DELETE", "/darts/v1/weights/staged/ab12"),
    ):
        answer = here.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (404, "NotFoundError", 404)
        assert error["message"].startswith("this route is gone; ")
        assert any(error["message"].endswith(remedy) for remedy in ROUTES.values())
    # This path is one of another route.
    answer = here.post("/darts/v1/rollouts/plan", json={})
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == f"this route is gone; {ROUTES['/darts/v1/rollouts/plan']}"


def test_query_parameters_that_are_gone_say_what_to_use_instead_and_nothing_is_replaced() -> None:
    updates = Mock(spec=Updates)
    with client(updates=updates) as here:
        saved = here.get("/darts/v1/state").content
        for (route, name), remedy in PARAMETERS.items():
            method, path = route.split()
            answer = here.request(method, path.format(name="a"), params={name: "true"}, content=b"")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
            assert answer.json()["error"]["message"] == f"{name}: is gone; {remedy}"
        assert here.get("/darts/v1/state").content == saved
    assert updates.mock_calls == []


BATCH: dict[str, object] = {"prompts": [{"text": "a"}], "group_size": 2}
UPDATE: dict[str, object] = {"path": "step-7"}


def test_fields_that_are_gone_say_what_to_use_instead(here: TestClient) -> None:
    cases: list[tuple[str, dict[str, object], str, str, object]] = [
        ("rollouts", BATCH, "RolloutsIn", "partial", True),
        ("rollouts", BATCH, "RolloutsIn", "cohort", {"groups": 24}),
        *(
            (path, UPDATE, model, field, value)
            for path, model in (("weights", "WeightsIn"), ("weights/lora/a", "LoraIn"))
            for field, value in (("stage", True), ("expires_after", 60))
        ),
        ("weights", {"version": 3}, "WeightsIn", "url", "http://a/b.safetensors"),  # what replaced it is missing
    ]
    assert {(model, field) for *_, model, field, _ in cases} == FIELDS.keys()
    for path, body, model, field, value in cases:
        answer = here.post(f"/darts/v1/{path}", json=body | {field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert answer.json()["error"]["message"].endswith(f"is gone; {FIELDS[model, field]}")
    unknown = here.post("/darts/v1/rollouts", json=BATCH | {"partially": True})
    assert unknown.json()["error"]["message"].endswith("is unknown; remove it")
