"""Request a batch from a running darts-server, and print its groups as they complete.

python -m examples.rollouts --url http://localhost:8000 --rewards
"""

import argparse
from collections.abc import Sequence
from random import Random

from darts_client import Client, Group, PromptSpec
from darts_server.offline.demo.problems import Problem, reward, sample_problem


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    rng = Random(options.seed)
    problems = [sample_problem(rng) for _ in range(options.prompts)]
    prompts = [PromptSpec(problem.prompt, metadata={"answer": problem.answer}) for problem in problems]
    with (
        Client(options.url, api_key=options.api_key) as client,
        client.rollouts(
            prompts,
            group_size=options.group_size,
            max_tokens=options.max_tokens,
            policy=options.policy,
            num_groups=options.num_groups,
            progress=options.progress,
        ) as groups,
    ):
        for group in groups:
            problem = problems[group.number]
            print(f"{problem.prompt:30} lengths {sorted(group.lengths)}, {len(group.discarded)} discarded")
            if options.rewards:
                _report_rewards(client, group, problem)
        for failure in groups.failed:
            print(f"failed: {failure.error}")
        print(f"{len(groups.unfinished)} unfinished; {groups.usage}")


def _report_rewards(client: Client, group: Group, problem: Problem) -> None:
    values = [reward(problem, trajectory.text) for trajectory in group.trajectories]
    counts = client.rewards(group, values)
    print(f"{'':30} {sum(values):.0f} of {len(values)} right, {counts.matched} rewards matched")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Request groups of the tiny task's prompts from a darts-server.")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="trajectories per prompt (default: %(default)s)")
    parser.add_argument("--num-groups", type=int, help="stop once this many groups are complete (default: all)")
    parser.add_argument("--max-tokens", type=int, default=200, help="per trajectory (default: %(default)s)")
    parser.add_argument("--policy", help="name of a policy (default: the server's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)")
    parser.add_argument("--rewards", action="store_true", help="verify the answers and report rewards")
    parser.add_argument("--progress", action="store_true", help="show a progress bar; needs rich")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
