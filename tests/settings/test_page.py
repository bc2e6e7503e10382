"""docs/settings.md knows all settings, and no others."""

import re
from pathlib import Path

from darts_server.settings.fields import ENV_PREFIX, Settings
from darts_server.settings.texts import flag_of

PAGE = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
OURS = {flag_of(name) for name in Settings.model_fields}
OTHERS = {"--darts-config", "--api-key", "--shutdown-timeout", "--help"}
"""Our flag that is no setting, and vLLM's."""


def test_every_setting_is_on_the_page_and_nothing_else() -> None:
    told = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    assert OURS - told == set()
    assert told - OURS - OTHERS == set()


def test_rows_name_the_environment_variable_of_their_first_flag() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)[^|]*\| ([^|]+) \|", PAGE, re.MULTILINE)
    for flag, variable in rows:
        if flag in OURS:
            assert f"`{ENV_PREFIX}{flag[2:].replace('-', '_').upper()}`" in variable, flag
