import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from darts_server.exceptions import InvalidSetting
from darts_server.http.security.access import MAX_KEY_FILE_BYTES, Access, Keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# the first team\none\n\n  two\t\r\n  # comment\nschlüssel\n")
    return path


def valid(keys: Keys) -> set[str]:
    return {
        key
        for key in ("given", "one", "two", "three", "schlüssel", "# the first team", "# comment")
        if keys.find_name(key.encode()) is not None
    }


def test_keys_come_from_the_arguments_and_the_file(file: Path) -> None:
    assert valid(Keys(["given"], file)) == {"given", "one", "two", "schlüssel"}
    assert not Keys()
    assert not valid(Keys())
    assert Keys(["given"]).find_name(None) is None
    keys = Keys(["given"], file)
    assert keys.find_name(b"one") == keys.find_name(b"one") != keys.find_name(b"two"), "a name, which is not the key"
    assert "one" not in (keys.find_name(b"one") or "")
    file.rename(file.with_name("data"))
    # Kubernetes mounts secrets as links.
    file.symlink_to("data")
    assert valid(Keys([], file)) == {"one", "two", "schlüssel"}
    with pytest.raises(InvalidSetting, match="nowhere cannot be read: No such file"):
        Keys([], file.with_name("nowhere"))


def test_keys_are_reloaded_from_the_file(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = Access(Keys(["given"], file), Keys(["root"]))
    file.write_text("three\n")
    assert valid(access.keys) == {"given", "one", "two", "schlüssel"}
    access.reload_keys()
    assert valid(access.keys) == {"given", "three"}
    assert access.admin_keys.find_name(b"root")
    [message] = caplog.messages
    assert f"API keys reloaded from {file}: 2 are valid" in message
    assert "three" not in caplog.text


@pytest.mark.timeout(20)
@pytest.mark.parametrize("replace", [lambda file: None, lambda file: file.write_text("\n"), os.mkfifo])
def test_keys_stay_if_the_file_is_missing_or_empty_or_becomes_a_pipe(
    file: Path, replace: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(["given"], file)
    file.unlink()
    replace(file)
    keys.reload()
    assert valid(keys) == {"given", "one", "two", "schlüssel"}
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert str(file) in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n# none\n", "must have keys, one per line"),
        ("x" * (MAX_KEY_FILE_BYTES + 1), "has more than 1048576 bytes"),
    ],
)
def test_an_empty_or_too_large_file_is_an_error(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidSetting, match=message):
        Keys([], file)


def test_callers_may_call_as_long_as_their_key_is_valid(file: Path) -> None:
    access = Access(Keys(["given"], file), Keys(["root"]))
    names = {key: keys.find_name(key.encode()) for keys, key in ((access.keys, "one"), (access.admin_keys, "root"))}
    assert all(name is not None and access.may_call(name) for name in names.values())
    assert not access.may_call(None), "there are keys"
    file.write_text("three\n")
    access.reload_keys()
    assert [access.may_call(name) for name in names.values()] == [False, True]
    assert Access().may_call(None)
    assert Access(admin_keys=Keys(["root"])).may_call(None)
    assert not Access().may_call(names["one"])
