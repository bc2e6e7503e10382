"""The table of trainers in the documentation is what its data gives."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.trainers import runs
from tests.trainers.table import PAGE, ROWS, page

RECORDED = [each["trainer"] for each in json.loads((Path(__file__).parent / "requests.json").read_text())]


def test_the_table_of_trainers_is_up_to_date() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tests.trainers.table"


def test_each_record_of_a_nightly_test_belongs_to_a_row() -> None:
    named = [name for row in ROWS for name in row.get("runs", ())]
    assert sorted(named) == sorted(file.stem for file in runs.FOLDER.glob("*.json"))


def test_a_row_without_a_nightly_test_says_what_else_was_run() -> None:
    for row in ROWS:
        if "runs" not in row and "ran" not in row:
            assert any(row["recorded"] in trainers for trainers in RECORDED), row


def test_a_run_that_differs_from_its_record_fails_once_and_rewrites_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    with pytest.raises(AssertionError, match=re.escape("trl.json had None. The file is now rewritten")):
        runs.record("trl", "trl", sys.executable, {"groups", "requests"})
    runs.record("trl", "trl", sys.executable, {"requests", "groups"})
    assert runs.read("trl")["parts"] == ["requests", "groups"]
    with pytest.raises(AssertionError, match=r"had .*'groups'"):
        runs.record("trl", "trl", sys.executable, {"requests"})
