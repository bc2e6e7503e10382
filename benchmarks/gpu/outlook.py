"""Where shaping pays on this card: the time of a rollout by the number of prompts, from lengths and step times alone.

What each candidate gets does not depend on the model, so it is worked out while the engines run; only the step times
are added at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.policies import PLAIN, SIZE, foretold
from benchmarks.gpu.tables import Table, Value
from benchmarks.gpu.traces import Trace
from darts_server.policy.latency.curve import LatencyCurve

PROMPTS = (8, 16, 32, 64, 128, 256)
TITLE = "Where shaping pays: foretold time relative to plain vLLM, by prompts in a rollout"


@dataclass(frozen=True)
class Outlook:
    """Tokens of all candidates: by number of prompts, then by policy, then of each batch of so many prompts."""

    tokens: dict[int, dict[str, list[list[int]]]]

    @staticmethod
    def of(trace: Trace, policies: Sequence[str]) -> "Outlook":
        tokens: dict[int, dict[str, list[list[int]]]] = {}
        for prompts in PROMPTS:
            if prompts <= len(trace.prompts):
                batches = list(_batches(trace, prompts))
                tokens[prompts] = {name: [foretold(name, batch) for batch in batches] for name in (PLAIN, *policies)}
        return Outlook(tokens)

    def table(self, curve: LatencyCurve, capacity: int | None) -> Table:
        """Times relative to plain's, each of all batches together."""
        policies = [name for name in next(iter(self.tokens.values()), {}) if name != PLAIN]
        columns = {"prompts": ",d", "plain, s a rollout": ".1f", **dict.fromkeys(policies, ".2f")}
        result = Table(TITLE, columns)
        for prompts, of_policy in self.tokens.items():
            times = {
                name: sum(curve.rollout_seconds(lengths, capacity) for lengths in batches)
                for name, batches in of_policy.items()
            }
            row: dict[str, Value] = {"prompts": prompts, "plain, s a rollout": times[PLAIN] / len(of_policy[PLAIN])}
            result.rows.append(row | {name: times[name] / times[PLAIN] for name in policies})
        result.note(
            f"Nothing here was run: it is the cost model with the step times above, lengths undivided and {SIZE} "
            "trajectories a prompt, over all batches of so many prompts that the trace has. With few prompts the card "
            "waits for the longest trajectory; with many it has work all the time, and more candidates take more time."
        )
        return result


def _batches(trace: Trace, prompts: int) -> Iterator[Trace]:
    for first in range(0, len(trace.prompts) - prompts + 1, prompts):
        yield Trace(trace.source, trace.cap, trace.prompts[first : first + prompts], trace.divisor)
