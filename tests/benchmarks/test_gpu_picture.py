from pathlib import Path

import pytest

from benchmarks.gpu.picture import BARS, PAGE, draw, read_seconds


def test_every_bar_has_a_row_with_its_time_on_the_page_of_results(tmp_path: Path) -> None:
    seconds = read_seconds(PAGE.read_text(encoding="utf-8"))
    for bar in BARS:
        assert [name for name in seconds if name.startswith(bar.row)], bar.row
    draw(seconds, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_times_of_a_table_are_read_with_their_errors() -> None:
    page = "\n".join(
        [
            "| eight steps of 64 groups | s a step |",
            "|---|---|",
            "| `off` | 11.3 ± 1.3 | 1 |",
            "| `cap`, the same | 4.1 ± .1 | **.37** |",
            "",
            "| another table | 9.0 ± 1.0 |",
        ]
    )
    assert read_seconds(page) == {"`off`": (11.3, 1.3), "`cap`, the same": (4.1, 0.1)}


def test_a_page_without_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no table that begins with"):
        read_seconds("| something else |")
