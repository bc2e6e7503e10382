"""Groups of a batch as they complete, from a darts-server that runs already:

python -m examples.rollouts --url http://localhost:8000 --rewards
"""

import argparse
from collections.abc import Sequence
from random import Random

from darts_client import Client, Group, PromptSpec
from darts_server.demo.problems import Problem, reward, sample_problem


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
                _tell(client, group, problem)
        for failure in groups.failed:
            print(f"failed: {failure.error}")
        print(f"{len(groups.unfinished)} unfinished; {groups.usage}")


def _tell(client: Client, group: Group, problem: Problem) -> None:
    values = [reward(problem, trajectory.text) for trajectory in group.trajectories]
    counts = client.rewards(group, values)
    print(f"{'':30} {sum(values):.0f} of {len(values)} right, {counts.matched} rewards taken")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Asks a darts-server for groups of the tiny task's prompts.")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--prompts", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="trajectories of each (default: %(default)s)")
    parser.add_argument("--num-groups", type=int, help="the first that many groups are enough")
    parser.add_argument("--max-tokens", type=int, default=200, help="of a trajectory (default: %(default)s)")
    parser.add_argument("--policy", help="the server's own if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--rewards", action="store_true", help="send what the tiny task gives for each answer")
    parser.add_argument("--progress", action="store_true", help="draw a bar; needs rich")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
