"""The benchmark of answers measures each form."""

from benchmarks.answers import measure


def test_each_form_is_measured_and_tensors_are_eight_bytes_a_token_and_the_text() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in measure(200, 1).splitlines()[2:]]
    assert [row[0] for row in rows] == ["JSON", "group event", "safetensors"]
    assert all(float(row[1]) > 0 for row in rows)
    sizes = [float(row[2]) for row in rows]
    assert sizes[2] < sizes[0] - 10
