"""The demo's pure parts: what it counts, prints and draws."""

from pathlib import Path

import pytest
from rich.console import Console

from darts_server.demo.problems import MAX_RESPONSE_TOKENS
from examples.tiny_rl import demo
from examples.tiny_rl.demo_report import EDGES, Run, picture, read_counts, table, verdict

RAW = Run(lengths=[(3, 20, 22, 255), (10, 10, 10, 10)], right=4, seconds=4.0)
SHAPED = Run(
    lengths=[(3, 20, 22, 35), (10, 10, 10, 10)],
    right=6,
    seconds=3.0,
    wasted=50,
    discarded=(1, 0, 0, 0, 1, 2, 0, 0, 0),
)

METRICS = """\
# TYPE darts_tokens_total counter
darts_tokens_total{{kind="generated",model_name="tiny"}} {generated}.0
darts_tokens_total{{kind="returned",model_name="tiny"}} {returned}.0
darts_tokens_total{{kind="wasted",model_name="tiny"}} {wasted}.0
# TYPE darts_trajectory_length_tokens histogram
{buckets}
# TYPE vllm:something gauge
vllm:something{{model_name="tiny"}} NaN
"""


def metrics_text(generated: list[int], returned: list[int]) -> str:
    up_to = {f"{float(edge)}": sum(length <= edge for length in generated) for edge in (*EDGES, 512)}
    up_to["+Inf"] = len(generated)
    name = "darts_trajectory_length_tokens_bucket"
    buckets = [f'{name}{{kind="generated",le="{edge}",model_name="tiny"}} {n}.0' for edge, n in up_to.items()]
    buckets += [f'{name}{{kind="returned",le="{edge}",model_name="tiny"}} 1000.0' for edge in up_to]
    total, kept = sum(generated), sum(returned)
    return METRICS.format(generated=total, returned=kept, wasted=total - kept, buckets="\n".join(buckets))


def printed(raw: Run, shaped: Run) -> dict[str, list[str]]:
    """The table's cells, by the name of the row."""
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(raw, shaped))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines() if "│" in line]
    return {name: cells for name, *cells in rows}


def test_bins_end_at_the_longest_answer_there_can_be() -> None:
    assert EDGES[-1] == MAX_RESPONSE_TOKENS


def test_a_length_on_an_edge_falls_into_the_bin_that_ends_there() -> None:
    run = Run(lengths=[(1, 2, 3, 4, 5, 256)], right=0, seconds=1.0)
    assert run.bins() == [1, 1, 2, 1, 0, 0, 0, 0, 1]


def test_a_run_without_shaping_wastes_nothing() -> None:
    assert RAW.generated == sum(RAW.flat) == 340
    assert not any(RAW.discarded)


def test_what_the_server_counted_is_what_it_counted_meanwhile() -> None:
    before = read_counts(metrics_text([7, 30], [7]))
    after = read_counts(metrics_text([7, 30, 3, 20, 0, 100], [7, 3, 20]))
    run = Run(lengths=[(3, 20)], right=1, seconds=1.0).counted(after - before)
    assert run.generated == 123
    assert run.wasted == 100
    assert run.discarded == [1, 0, 0, 0, 0, 0, 0, 1, 0]


def test_gauges_that_know_nothing_yet_are_left_aside() -> None:
    text = metrics_text([3, 20], [3])
    unknown = '# TYPE darts_step_seconds gauge\ndarts_step_seconds{model_name="tiny",sequences="4"} NaN\n'
    assert read_counts(text + unknown) == read_counts(text)


def test_tokens_that_the_server_did_not_count_are_an_error() -> None:
    counts = read_counts(metrics_text([3, 20], [3]))
    with pytest.raises(RuntimeError, match="23 tokens came, the server counted 3"):
        Run(lengths=[(3, 20)], right=1, seconds=1.0).counted(counts)


def test_table_has_raw_shaped_and_their_ratio() -> None:
    assert printed(RAW, SHAPED) == {
        "right answers": ["50.0%", "75.0%", "1.50"],
        "length, mean (tokens)": ["42.5", "15.0", "0.35"],
        "length, 95th percentile": ["173", "30", "0.18"],
        "length, longest": ["255", "35", "0.14"],
        "length, std within a group": ["52.1", "5.7", "0.11"],
        "tokens generated": ["340", "170", "0.50"],
        "tokens returned": ["340", "120", "0.35"],
        "tokens wasted": ["0", "50", "-"],
        "wall time (s)": ["4.0", "3.0", "0.75"],
    }


def test_no_right_answer_at_all_leaves_the_ratio_out() -> None:
    none = Run(lengths=[(3, 3)], right=0, seconds=1.0)
    assert printed(none, none)["right answers"] == ["0.0%", "0.0%", "-"]


@pytest.mark.parametrize(("seconds", "pace"), [(3.0, "faster"), (4.4, "about as fast"), (5.0, "slower")])
def test_verdict_says_which_was_faster(seconds: float, pace: str) -> None:
    first, second = verdict(RAW, Run(SHAPED.lengths, SHAPED.right, seconds, SHAPED.wasted)).splitlines()
    assert first == (
        f"Shaping generated 0.50 x the tokens and took {seconds / 4:.2f} x the time for the same number of "
        f"trajectories (8): here it was {pace}."
    )
    assert second == (
        "Its trajectories have 15.0 tokens on average (raw: 42.5) and 35 at most (raw: 255); 75% are right (raw: 50%)."
    )


def test_picture_is_a_png_in_a_folder_that_need_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lengths.png"
    picture(RAW, SHAPED, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_picture_goes_into_the_folder_unless_it_is_named() -> None:
    assert demo.arguments(["--out", "here"]).picture == Path("here/lengths.png")
    assert demo.arguments(["--out", "here", "--picture", "there.png"]).picture == Path("there.png")


@pytest.mark.parametrize("argv", [["--groups", "0"], ["--group-size", "1"], ["--port", "x"]])
def test_options_that_make_no_sense_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.arguments(argv)
    assert argv[0] in capsys.readouterr().err
