"""docs/settings.md lists all settings, and no others."""

import re
from pathlib import Path

from darts_server.settings.fields import ENV_PREFIX, Settings
from darts_server.settings.messages import flag_of

PAGE = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
OURS = {flag_of(name) for name in Settings.model_fields}
OTHERS = {
    *("--darts-config", "--api-key", "--allowed-origins", "--host", "--logprobs-mode", "--shutdown-timeout", "--help")
}
"""A flag of ours that is not a setting, and flags of vLLM."""


def test_every_setting_is_on_the_page_and_nothing_else() -> None:
    documented = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    assert OURS - documented == set()
    assert documented - OURS - OTHERS == set()


def test_rows_name_the_environment_variable_of_their_first_flag() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)[^|]*\| ([^|]+) \|", PAGE, re.MULTILINE)
    for flag, variable in rows:
        if flag in OURS:
            assert f"`{ENV_PREFIX}{flag[2:].replace('-', '_').upper()}`" in variable, flag
