"""Which distribution is sampled from, and which one log-probs are of, for a model with a `generation_config`."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from darts_client import Client
from darts_server.offline.demo.server import DARTS, MODEL, Server
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine
PROMPT = "7a-5b*4>"
BATCH = {"prompts": [{"text": PROMPT}], "group_size": 8, "policy": {"name": "off"}}
VOTE = {"prompt": PROMPT, "n": 4, "pattern": "#([0-9])"}


@pytest.fixture(scope="module")
def processed(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves the tiny model with a `generation_config` that always samples the likeliest token."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"do_sample": True, "top_k": 1}))
    with serve((*DARTS[:-1], str(folder)), folder / "processed.log") as running:
        yield running


def rollouts(server: Server, **sampling: Any) -> httpx.Response:
    body = BATCH | {"sampling": {"max_tokens": 40} | sampling}
    return httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=240)


def texts(answer: httpx.Response) -> set[str]:
    return {trajectory["text"] for trajectory in answer.json()["groups"][0]["trajectories"]}


@pytest.mark.nightly
def test_our_routes_and_the_client_ignore_the_models_generation_config(processed: Server) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "n": 8, "max_tokens": 40}
    choices = httpx.post(f"{processed.url}/v1/completions", json=body, timeout=240).json()["choices"]
    assert len({choice["text"] for choice in choices}) == 1, "vLLM's route applies it, as always"
    answer = rollouts(processed)
    assert len(texts(answer)) > 1
    assert {"top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_tokens": 40}.items() <= answer.json()["sampling"].items()
    vote = httpx.post(
        f"{processed.url}/darts/v1/vote", json=VOTE | {"sampling": {"max_tokens": 40}}, timeout=240
    ).json()
    assert vote["sampling"]["top_k"] == 0
    with Client(processed.url) as client:
        [group] = client.completions(PROMPT, group_size=8, max_tokens=40, policy="off")
        assert len({trajectory.text for trajectory in group.trajectories}) > 1


def test_logprobs_are_those_of_the_distribution_that_is_sampled_from(server: Server) -> None:
    answer = rollouts(server, top_k=1, temperature=0.5, logprobs=True)
    for trajectory in answer.json()["groups"][0]["trajectories"]:
        assert trajectory["logprobs"] == [0.0] * trajectory["length"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "logprobs": 0, "top_k": 1}
    [choice] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240).json()["choices"]
    assert set(choice["logprobs"]["token_logprobs"]) == {0.0}, "also on vLLM's routes"
