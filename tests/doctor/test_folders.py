import os
import sqlite3
from pathlib import Path

import pytest

from darts_server.doctor.findings import Verdict
from darts_server.doctor.folders import check_state, check_weights
from darts_server.store import Store

as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def test_an_existing_or_creatable_state_folder_is_ok_and_nothing_is_created(tmp_path: Path) -> None:
    assert check_state(None).verdict is Verdict.OK
    assert check_state(tmp_path / "new" / "state").verdict is Verdict.OK
    assert not (tmp_path / "new").exists()
    with Store(tmp_path / "old") as store:
        store.put("prompt", "p", {"count": 1})
    assert check_state(tmp_path / "old").verdict is Verdict.OK


def test_a_damaged_state_file_fails_and_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"not a database at all" * 100)
    assert check_state(tmp_path).verdict is Verdict.FAIL
    assert (tmp_path / "state.db").read_bytes() == b"not a database at all" * 100


def test_a_state_file_of_a_newer_server_fails(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "state.db") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    finding = check_state(tmp_path)
    assert finding.verdict is Verdict.FAIL
    assert "newer" in finding.message


def test_a_file_in_place_of_the_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_state(tmp_path / "file" / "state").verdict is Verdict.FAIL
    assert check_state(tmp_path / "file").verdict is Verdict.FAIL


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    assert check_state(tmp_path, 1 << 62).verdict is Verdict.WARN


@as_user
def test_a_folder_without_write_permission_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert check_state(tmp_path).verdict is Verdict.FAIL
    assert [finding.verdict for finding in check_weights(None, tmp_path, None)] == [Verdict.FAIL]


def test_staging_needs_room_for_two_models(tmp_path: Path) -> None:
    root, staging = check_weights(tmp_path, tmp_path, 1000)
    assert (root.verdict, staging.verdict) == (Verdict.OK, Verdict.OK)
    [staging] = check_weights(None, tmp_path, 1 << 60)
    assert staging.verdict is Verdict.WARN
    assert "--weights-staging" in staging.message
    [staging] = check_weights(None, None, None)
    assert staging.verdict is Verdict.OK
