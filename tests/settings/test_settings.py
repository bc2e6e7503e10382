import argparse
from pathlib import Path

import pytest

from darts_server.exceptions import InvalidRequest, InvalidSetting
from darts_server.settings import Settings, add_flags, apply_patch, load


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "darts.toml"


def test_flags_override_the_environment_which_overrides_the_file_which_overrides_defaults(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("redundancy = 2.5\nnum_longest = 3\ncohort_window = 0.5\n")
    monkeypatch.setenv("DARTS_REDUNDANCY", "2.0")
    monkeypatch.setenv("DARTS_NUM_LONGEST", "2")
    settings = load({"redundancy": "1.25", "tail": None}, str(config))
    assert (settings.redundancy, settings.num_longest) == (1.25, 2)
    assert (settings.cohort_window, settings.tail) == (0.5, "sampled")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"redundancy": "0.5"}, ["--redundancy = 0.5", "must be a number from 1 to 16, or auto"]),
        ({"tail": "short"}, ["--tail = short", "'sampled' or 'longest'"]),
        ({"policy": "fast"}, ["--policy = fast", "'uniform', 'darts'"]),
        ({"group_size": "8", "num_longest": "8"}, ["num_longest must be smaller than group_size = 8"]),
        ({"redundancy": "cv_log"}, ["--redundancy = cv_log", "must be a number from 1 to 16, or auto"]),
        ({"group_size": "1025"}, ["--group-size = 1025", "2 to 1024"]),
        ({"redundancy": "0", "tail": "x"}, ["--redundancy", "--tail"]),
        ({"policy": "darts", "redundancy": "3"}, ["redundancy must be at most max_redundancy = 2.0, got 3.0"]),
        ({"reuse_streams": "true"}, ["reuse_streams needs --sampling coupled and --speculate auto"]),
        ({"reuse_streams": "true", "sampling": "coupled"}, ["reuse_streams needs"]),
        ({"reuse_streams": "true", "speculate": "auto"}, ["reuse_streams needs"]),
        ({"sampling": "seeded"}, ["--sampling = seeded", "'vllm' or 'coupled'"]),
        ({"ray_address": "auto"}, ["ray_address is only used with replicas; set --replicas, or omit it"]),
        ({"gpus_per_replica": "2"}, ["gpus_per_replica is only used with replicas"]),
        ({"verifier_default": "nan"}, ["--verifier-default = nan", "finite number"]),
        ({"verifier_timeout": "0"}, ["--verifier-timeout = 0", "0.01 to 3600"]),
        ({"keep_ratio": "0.95"}, ["keep_ratio must be from 0.1 to 0.9, or 1 to score candidates and prune none"]),
    ],
)
def test_an_invalid_flag_is_reported_with_value_and_range(flags: dict[str, str | None], words: list[str]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(flags, None)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_invalid_variable_or_file_is_reported(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match=r"darts\.toml is not a file"):
        load({}, str(config))
    for written, message in (
        ("redundancy = = 2", r"darts\.toml"),
        ("redundncy = 2\n", "redundncy: unknown setting; the settings are policy, redundancy"),
    ):
        config.write_text(written)
        with pytest.raises(InvalidSetting, match=message):
            load({}, str(config))
    monkeypatch.setenv("DARTS_REDUNDANCY", "0")
    with pytest.raises(InvalidSetting, match=r"redundancy \(from DARTS_REDUNDANCY or the file\) = 0"):
        load({}, None)


def test_every_setting_is_a_flag_with_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    help_text = parser.format_help()
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in help_text
        assert field.description


def test_a_patch_keeps_other_settings_wherever_they_came_from(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("redundancy = 1.75\ncohort_window = 0.5\n")
    monkeypatch.setenv("DARTS_NUM_LONGEST", "3")
    before = load({"state_dir": "/tmp/learned"}, str(config))
    monkeypatch.setenv("DARTS_NUM_LONGEST", "4")
    monkeypatch.setenv("DARTS_TAIL", "nonsense")
    config.unlink()
    after = apply_patch(apply_patch(before, {"policy": "off"}), {"group_size": 8})
    assert after.model_dump() == before.model_dump() | {"policy": "off", "group_size": 8}
    assert before.policy == "auto"


@pytest.mark.parametrize(
    ("patch", "field", "words"),
    [
        ({"redundancy": 0.5}, "redundancy", "must be a number from 1 to 16, or auto, got 0.5"),
        ({"redundancy": "2"}, "redundancy", "must be a number from 1 to 16, or auto, got '2'"),
        ({"max_redundancy": "2"}, "max_redundancy", "valid number, got '2'"),
        ({"group_size": True}, "group_size", "valid integer, got True"),
        ({"num_longest": 8, "group_size": 8}, "num_longest", "smaller than group_size = 8"),
        ({"state_dir": "/tmp"}, "state_dir", "cannot change while the server runs; settings that can"),
        ({"most_stale": 1.5}, "most_stale", "input should be less than or equal to 1, got 1.5"),
        ({"redundncy": 2}, "redundncy", "unknown setting; settings that can change are policy"),
    ],
)
def test_an_invalid_patch_names_the_key_with_the_same_message_as_at_start(
    patch: dict[str, object], field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        apply_patch(load({}, None), patch)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize("flag", ["weights_root", "weights_staging"])
def test_weight_folders_must_exist(flag: str, tmp_path: Path) -> None:
    assert getattr(load({flag: str(tmp_path)}, None), flag) == tmp_path
    with pytest.raises(InvalidSetting, match=f"{flag} must be an existing folder"):
        load({flag: str(tmp_path / "nowhere")}, None)


def test_boolean_settings_are_flags_without_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = vars(parser.parse_args(["--allow-unauthenticated"]))
    flags.pop("darts_config")
    assert load(flags, None).allow_unauthenticated
    assert not load(flags, None).allow_dangerous_routes
    monkeypatch.setenv("DARTS_ALLOW_DANGEROUS_ROUTES", "1")
    assert load(flags, None).allow_dangerous_routes


def test_keys_are_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTS_ADMIN_API_KEY", "sesame")
    settings = load({}, None)
    assert settings.admin_api_key is not None
    assert settings.admin_api_key.get_secret_value() == "sesame"
    assert "sesame" not in f"{settings!r} {settings} {settings.model_dump(mode='json')}"
    with pytest.raises(InvalidSetting) as error:
        load({"redundancy": "0"}, None)
    assert "sesame" not in str(error.value)
    assert "sesame" not in str(apply_patch(settings, {"redundancy": 1.25}))


def test_an_empty_key_means_none_in_the_environment_but_is_an_error_as_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTS_ADMIN_API_KEY", "")
    assert load({}, None).admin_api_key is None
    with pytest.raises(InvalidSetting, match="--admin-api-key"):
        load({"admin_api_key": ""}, None)


def test_allowed_hosts_are_names_and_patterns_of_names() -> None:
    for hosts in ("", "*", "node17", "rollouts.example.com,*.cluster.local"):
        assert load({"allowed_hosts": hosts}, None).allowed_hosts == hosts
    for hosts in ("node17:8000", "http://node17", "a*", "a.*", "**", "*.", "a, b", "a,,b", ","):
        with pytest.raises(InvalidSetting, match="--allowed-hosts"):
            load({"allowed_hosts": hosts}, None)


def test_detection_points_are_ascending_numbers_separated_by_commas(config: Path) -> None:
    assert load({"detect_at": "512, 128,512"}, None).detect_at == (128, 512)
    config.write_text("detect_at = [64, 32]\n")
    assert load({}, str(config)).detect_at == (32, 64)
    for wrong in ("0", "", "a,b", "128,,512", "1.5"):
        with pytest.raises(InvalidSetting, match=r"--detect-at = .*: must be positive whole numbers.*Default: 512"):
            load({"detect_at": wrong}, None)


def test_verifiers_are_repeated_flags_lines_of_a_variable_or_a_list(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load({}, None).verifier == ()
    parser = argparse.ArgumentParser()
    add_flags(parser)
    parsed = vars(parser.parse_args(["--verifier", "boxed", "--verifier", r"n=0.5*regex:a;(\d), b"]))
    parsed.pop("darts_config")
    assert load(parsed, None).verifier == ("boxed", r"n=0.5*regex:a;(\d), b")
    config.write_text('verifier = ["boxed", "math-verify"]\n')
    assert load({}, str(config)).verifier == ("boxed", "math-verify")
    monkeypatch.setenv("DARTS_VERIFIER", "boxed\n\nrewards.py:score\n")
    assert load({}, str(config)).verifier == ("boxed", "rewards.py:score")
    config.write_text("verifier = [1]\n")
    monkeypatch.delenv("DARTS_VERIFIER")
    with pytest.raises(InvalidSetting, match=r"verifier .* valid string"):
        load({}, str(config))


def test_dialects_are_known_names_without_duplicates(config: Path) -> None:
    assert load({}, None).dialect == ()
    assert load({"dialect": "areal, prime-rl,areal,"}, None).dialect == ("areal", "prime-rl")
    config.write_text('dialect = ["skyrl"]\n')
    assert load({}, str(config)).dialect == ("skyrl",)
    for wrong, name in (("areal,verl", "verl"), ("prime_rl", "prime_rl")):
        with pytest.raises(InvalidSetting, match=f"--dialect = .*'{name}' is unknown; choose from areal, nemo-rl"):
            load({"dialect": wrong}, None)
