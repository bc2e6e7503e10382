"""How many steps drafts save with a real language model, SmolLM2-135M, on word problems.

The same problems are answered in each epoch, with unchanged weights. All answers of an epoch run at the same time, so
without drafts an epoch takes as many steps as its longest answer has tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx
import numpy as np
from tqdm import tqdm

from benchmarks.tables import markdown
from benchmarks.word_problems import MAX_TOKENS, batch, reward, word_problems
from darts_server.offline.demo.server import Server

GROUP_SIZE = 8
FLAGS = ("--served-model-name", "smollm2", "--max-model-len", "512")
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
STEPS = "darts_decode_steps_total"
TIMEOUT_SECONDS = 3600.0


def words(
    serving: Callable[[], AbstractContextManager[Server]], temperatures: Sequence[float], count: int, epochs: int
) -> str:
    """Return a table of each temperature and epoch. Each temperature has a new server."""
    problems = word_problems(0, count)
    rows = []
    with tqdm(total=len(temperatures) * epochs, unit="epoch") as bar:
        for temperature in temperatures:
            with serving() as server:
                for epoch in range(epochs):
                    before = [server.metric(name) for name in (STEPS, ACCEPTED, DRAFTED)]
                    body: dict[str, Any] = {"prompts": batch(problems), "group_size": GROUP_SIZE}
                    body["sampling"] = {"max_tokens": MAX_TOKENS, "temperature": temperature, "logprobs": True}
                    body["policy"] = {"name": "off"}
                    answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=TIMEOUT_SECONDS)
                    groups = answer.raise_for_status().json()["groups"]
                    after = [server.metric(name) for name in (STEPS, ACCEPTED, DRAFTED)]
                    steps, accepted, drafted = np.subtract(after, before)
                    trajectories = [(group["number"], each) for group in groups for each in group["trajectories"]]
                    lengths = [each["length"] for _, each in trajectories]
                    rights = [reward(problems[number], each["text"]) for number, each in trajectories]
                    logprobs = [logprob for _, each in trajectories for logprob in each["logprobs"]]
                    rows.append(
                        [
                            f"{temperature:g}",
                            str(epoch + 1),
                            f"{steps:.0f}, {max(lengths)}",
                            f"{steps / max(lengths):.2f}",
                            # Each step of a sequence gives a token of the model's own, and the accepted tokens.
                            f"{sum(lengths) / (sum(lengths) - accepted):.2f}",
                            f"{accepted / max(drafted, 1):.2f}",
                            f"{np.mean(lengths):.0f}",
                            f"{np.mean(rights):.2f}",
                            f"{-np.mean(logprobs):.2f}",
                        ]
                    )
                    bar.update()
    head = ["temperature", "epoch", "steps, longest answer", "ratio", "tokens a sequence and step", "share accepted"]
    head += ["length", "right", "nats a token"]
    return markdown(head, rows)
