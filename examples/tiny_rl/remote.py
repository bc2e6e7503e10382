"""The training loop's requests to the server, for groups and for evaluation."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from darts_client import Client, Group, PromptSpec, Trajectory
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS
from examples.tiny_rl.method import Method

# A batch of the tiny task takes seconds.
TIMEOUT_SECONDS = 300.0
# Connections of an evaluation. With 4 samples each they fill the engine.
CONNECTIONS = 32
STEPS_METRIC = "darts_decode_steps_total"


@dataclass(frozen=True)
class Rollouts:
    """The groups of a batch, in the order of their prompts."""

    groups: Sequence[Group]
    generated: int
    """Tokens of all candidates, also of stopped groups. A resumed group counts in the batch that ends it."""
    decode_steps: int
    """Decode steps of the engine from the request to the last group."""


def rollouts(
    client: Client,
    method: Method,
    prompts: Sequence[list[int] | PromptSpec],
    group_size: int,
    num_groups: int,
) -> Rollouts:
    """Start a group for each prompt, and return the first ``num_groups`` that are complete."""
    steps_before = decode_steps(client)
    batch = client.rollouts(
        prompts,
        group_size=group_size,
        max_tokens=method.max_tokens,
        policy=method.policy,
        num_groups=None if num_groups == len(prompts) else num_groups,
        carry=method.carry,
    )
    groups = sorted(batch, key=lambda group: group.number)
    if batch.failed:
        raise RuntimeError(f"{len(batch.failed)} of {len(prompts)} groups failed; the first: {batch.failed[0].error}")
    assert batch.usage is not None, "a finished batch has its usage"
    return Rollouts(groups, batch.usage.generated, decode_steps(client) - steps_before)


def decode_steps(client: Client) -> int:
    """Return the number of steps that the engine has made since its start."""
    return decode_steps_of(client.metrics())


def decode_steps_of(metrics: str) -> int:
    """Return the number of the engine's steps from the server's metrics in Prometheus' text format."""
    samples = (sample for family in text_string_to_metric_families(metrics) for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name == STEPS_METRIC))


def samples(client: Client, prompts: Sequence[str], count: int, seed: int) -> list[tuple[Trajectory, ...]]:
    """Request ``count`` unshaped answers to each prompt. The server does not learn from them.

    Sample k of prompt i has the seed ``seed + i * count + k``. One request with all prompts would have only ``count``
    different seeds.
    """

    def answers(number: int) -> tuple[Trajectory, ...]:
        [group] = client.completions(
            prompts[number],
            group_size=count,
            max_tokens=MAX_RESPONSE_TOKENS,
            seed=seed + number * count,
            policy="off",
            logprobs=False,
        )
        return group.trajectories

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        return list(threads.map(answers, range(len(prompts))))


def truncated(trajectory: Trajectory) -> bool:
    """Return whether the trajectory reached its length limit, or the deadline of ``darts_cut``."""
    return trajectory.finish_reason == "length"
