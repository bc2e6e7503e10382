from pathlib import Path
from random import Random

from darts_server.demo.picture import draw
from darts_server.demo.report import Run
from darts_server.demo.rollouts import Step

LARGEST = 150 * 1024


def synthetic(name: str, seed: int) -> Run:
    rng = Random(seed)

    def step() -> Step:
        lengths = [[min(256, int(rng.lognormvariate(3, 1)) + 1) for _ in range(8)] for _ in range(8)]
        arrivals = sorted(max(group) / 200 for group in lengths)
        return Step(arrivals, lengths, 30, sum(map(sum, lengths)), arrivals[-1] + 0.01)

    return Run(name, [step() for _ in range(8)])


def test_picture_is_a_small_png_in_a_folder_that_need_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "new" / "demo.png"
    draw([synthetic("raw", 1), synthetic("uniform", 2), synthetic("darts_cut", 3)], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 20_000 < path.stat().st_size < LARGEST
