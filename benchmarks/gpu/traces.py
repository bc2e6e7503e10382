"""Lengths of every candidate of every prompt: sampled with a seed, or recorded.

A recorded trace is a file in JSON Lines, one line for each prompt, its trajectories' lengths in tokens::

    {"lengths": [412, 388, 1903, 455, 4096, 401, 390, 520]}

The longest length of the whole file counts as the length limit that it was recorded with: trajectories that have it
count as truncated, all others as finished. The first 16 lengths of a prompt are its candidates; a prompt with fewer
gets the rest by resampling its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from darts_server.types import FinishReason

CANDIDATES = 16
"""Lengths of each prompt: the most candidates of a group of 8."""
EARLIER = 8
"""Lengths of the earlier sample, for the statistics of prompts."""
SAMPLED = 256
"""Prompts of a sampled trace; a smaller rollout takes the first of them."""
CAP = 8192
MEDIAN = 700.0
SPREAD_OF_PROMPTS, SPREAD_WITHIN = 0.5, 0.4
"""Stds of the logarithm: of prompts' medians, and of a prompt's own lengths without its tail."""
TAIL_SHARE, TAIL_FACTOR = 0.06, 10.0
"""Mean share of a prompt's candidates in the tail, and how much longer they are."""
TAIL_SHAPE = 1.5
"""Shape of the beta distribution of that share: some prompts have nearly no tail, others a fifth of the candidates."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Lengths in tokens: of the candidates by index, and of an earlier sample of the same prompt."""

    lengths: tuple[int, ...]
    earlier: tuple[int, ...]

    def length(self, index: int) -> int:
        """Return the length of a candidate; replacements of failed ones may have an index beyond the sampled ones."""
        return self.lengths[index % len(self.lengths)]


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts, and the limit ``cap`` at which candidates are truncated. All lengths were divided by ``divisor``."""

    source: str
    cap: int
    prompts: tuple[Prompt, ...]
    divisor: int = 1

    def reason(self, length: int) -> FinishReason:
        return FinishReason.LENGTH if length >= self.cap else FinishReason.STOP

    def first(self, prompts: int) -> "Trace":
        return Trace(self.source, self.cap, self.prompts[:prompts], self.divisor)

    def shortened(self, divisor: int) -> "Trace":
        """Divide all lengths and the limit; the shape of the distribution stays."""

        def short(lengths: Sequence[int]) -> tuple[int, ...]:
            return tuple(max(1, round(length / divisor)) for length in lengths)

        prompts = tuple(Prompt(short(p.lengths), short(p.earlier)) for p in self.prompts)
        return Trace(self.source, max(1, round(self.cap / divisor)), prompts, self.divisor * divisor)


def sample(seed: int, prompts: int) -> Trace:
    """Sample a log-normal mixture: prompts differ in their median and in the weight of their tail."""
    rng = np.random.default_rng(seed)
    count = CANDIDATES + EARLIER
    medians = MEDIAN * np.exp(rng.normal(0.0, SPREAD_OF_PROMPTS, prompts))
    shares = rng.beta(TAIL_SHAPE, TAIL_SHAPE / TAIL_SHARE - TAIL_SHAPE, prompts)
    body = np.exp(rng.normal(0.0, SPREAD_WITHIN, (prompts, count)))
    tail = TAIL_FACTOR * np.exp(rng.normal(0.0, SPREAD_WITHIN, (prompts, count)))
    factors = np.where(rng.random((prompts, count)) < shares[:, None], tail, body)
    lengths = np.clip(np.rint(medians[:, None] * factors), 1, CAP).astype(int).tolist()
    source = f"log-normal mixture, seed {seed}"
    return Trace(source, CAP, tuple(Prompt(tuple(row[:CANDIDATES]), tuple(row[CANDIDATES:])) for row in lengths))


def load_or_sample(paths: Sequence[Path], seed: int) -> list[Trace]:
    """Read the traces from the files, or sample one."""
    return [recorded(path, seed) for path in paths] or [sample(seed, SAMPLED)]


def recorded(path: Path, seed: int) -> Trace:
    """Read the trace from a file of the format above.

    Raises:
        ValueError: the file has another format; the message names the line.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            value = json.loads(line or "null")
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from None
        lengths = value.get("lengths") if isinstance(value, dict) else None
        if isinstance(lengths, list) and lengths and all(type(n) is int and n > 0 for n in lengths):
            rows.append(lengths)
        elif line:
            raise ValueError(f'{path}:{number} must be like {{"lengths": [412, 388]}}, whole numbers above 0')
    if not rows:
        raise ValueError(f"{path} has no prompts")
    rng = np.random.default_rng(seed)
    prompts = []
    for row in rows:
        lengths = row[:CANDIDATES] + rng.choice(row, max(0, CANDIDATES - len(row))).tolist()
        prompts.append(Prompt(tuple(lengths), tuple(rng.choice(row, EARLIER).tolist())))
    return Trace(f"recorded in {path.name}", max(map(max, rows)), tuple(prompts))
