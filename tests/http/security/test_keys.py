import logging
from pathlib import Path

import pytest

from darts_server.exceptions import InvalidSetting
from darts_server.http.security.access import LARGEST_KEY_FILE, Access, Keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("one\n\n  two\t\r\nschlüssel\n")
    return path


def opened(keys: Keys) -> set[str]:
    return {key for key in ("given", "one", "two", "three", "schlüssel") if keys.find(key.encode()) is not None}


def test_keys_are_those_given_and_those_in_the_file_one_a_line(file: Path) -> None:
    assert opened(Keys(["given"], file)) == {"given", "one", "two", "schlüssel"}
    assert not Keys()
    assert not opened(Keys())
    assert Keys(["given"]).find(None) is None


def test_equal_keys_have_a_name_that_is_not_the_key(file: Path) -> None:
    keys = Keys(["given"], file)
    assert keys.find(b"one") == keys.find(b"one") != keys.find(b"two")
    assert "one" not in (keys.find(b"one") or "")


def test_the_file_is_read_again_when_that_is_asked_for(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    access = Access(Keys(["given"], file), Keys(["root"]))
    file.write_text("three\n")
    assert opened(access.keys) == {"given", "one", "two", "schlüssel"}
    access.read_again()
    assert opened(access.keys) == {"given", "three"}
    assert access.admin_keys.find(b"root")
    [said] = caplog.messages
    assert f"2 keys are valid after {file} was read again" in said
    assert "three" not in caplog.text


@pytest.mark.parametrize("text", [None, "\n"])
def test_keys_stay_if_the_file_is_gone_or_empty(file: Path, text: str | None, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(["given"], file)
    file.unlink()
    if text is not None:
        file.write_text(text)
    keys.read_again()
    assert opened(keys) == {"given", "one", "two", "schlüssel"}
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert str(file) in caplog.text


@pytest.mark.parametrize("text", ["", "\n \n", "x" * (LARGEST_KEY_FILE + 1)])
def test_a_file_without_a_key_or_too_large_stops_the_start(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidSetting, match="must have keys, one a line"):
        Keys([], file)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="nowhere with keys cannot be read: No such file"):
        Keys([], tmp_path / "nowhere")
