"""Predict where shaping pays on this card: the time of a rollout by number of prompts, from lengths and step times.

The tokens of each candidate do not depend on the model, so they are computed while the engines run; the step times are
added at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.cost_model import rollout_seconds
from benchmarks.gpu.policies import PLAIN, SIZE, predict_tokens
from benchmarks.gpu.tables import Table, Value
from benchmarks.gpu.traces import Trace
from darts_server.policy.latency import LatencyCurve

PROMPTS = (8, 16, 32, 64, 128, 256)
TITLE = "Where shaping pays: predicted time relative to plain vLLM, by prompts in a rollout"


@dataclass(frozen=True)
class Outlook:
    """Tokens of all candidates: by number of prompts, by policy, and for each batch of so many prompts."""

    tokens: dict[int, dict[str, list[list[int]]]]

    @staticmethod
    def of(trace: Trace, policies: Sequence[str]) -> "Outlook":
        tokens: dict[int, dict[str, list[list[int]]]] = {}
        for prompts in PROMPTS:
            if prompts <= len(trace.prompts):
                batches = list(_batches(trace, prompts))
                tokens[prompts] = {
                    name: [predict_tokens(name, batch) for batch in batches] for name in (PLAIN, *policies)
                }
        return Outlook(tokens)

    def table(self, curve: LatencyCurve, capacity: int | None) -> Table:
        """Return times relative to plain's, each over all batches."""
        policies = [name for name in next(iter(self.tokens.values()), {}) if name != PLAIN]
        columns = {"prompts": ",d", "plain, s a rollout": ".1f", **dict.fromkeys(policies, ".2f")}
        result = Table(TITLE, columns)
        for prompts, by_policy in self.tokens.items():
            times = {
                name: sum(rollout_seconds(curve, lengths, capacity) for lengths in batches)
                for name, batches in by_policy.items()
            }
            row: dict[str, Value] = {"prompts": prompts, "plain, s a rollout": times[PLAIN] / len(by_policy[PLAIN])}
            result.rows.append(row | {name: times[name] / times[PLAIN] for name in policies})
        result.note(
            "Nothing here was run: the cost model predicts it from the step times above, with undivided lengths and "
            f"{SIZE} trajectories a prompt, over all batches of that size in the trace. With few prompts the card "
            "waits for the longest trajectory; with many it is always busy, and more candidates take more time."
        )
        return result


def _batches(trace: Trace, prompts: int) -> Iterator[Trace]:
    for first in range(0, len(trace.prompts) - prompts + 1, prompts):
        yield Trace(trace.source, trace.cap, trace.prompts[first : first + prompts], trace.divisor)
