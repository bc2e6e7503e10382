"""Prompts with images: each is generated, also if it was rendered long before it is sent, or never sent."""

import base64
import io
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from darts_server.offline.demo.server import DARTS, Server, serving
from tests.integration.vision_model import save_vision_model
from tests.integration.waiting import STARTED, wait_counted

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
GROUP = {"group_size": 4, "sampling": {"max_tokens": 8}}
LONG = {"group_size": 8, "sampling": {"max_tokens": 250, "ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_vision_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = (*DARTS[:-1], str(model))
    path = {"PYTHONPATH": str(HERE / "without_torchvision")}
    with serving(command, tmp_path_factory.mktemp("server") / "log", "--skip-mm-profiling", env=path) as running:
        yield running


def messages(colour: tuple[int, int, int]) -> dict[str, Any]:
    """Return a prompt with an image of one colour."""
    picture = io.BytesIO()
    Image.new("RGB", (28, 28), colour).save(picture, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    return {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "1+2"}],
            }
        ]
    }


def prompts(red: int, count: int) -> list[dict[str, Any]]:
    return [messages((red, 10 * number, 0)) for number in range(count)]


def sizes(server: Server, body: dict[str, Any]) -> list[int]:
    """Return the number of trajectories of each group of a batch, in which no group may fail."""
    answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=120).raise_for_status().json()
    assert [group["error"] for group in answer["groups"]] == [None] * len(answer["groups"])
    return [len(group["trajectories"]) for group in answer["groups"]]


def test_a_refused_batch_does_no_harm_to_the_next_batch_with_its_images(server: Server) -> None:
    body = {"prompts": prompts(1, 3), **GROUP}
    refused = httpx.post(f"{server.url}/darts/v1/rollouts", json={**body, "num_groups": 9})
    assert refused.status_code == 400
    assert sizes(server, body) == [4] * 3


def test_carried_prompts_with_images_are_generated_in_a_later_batch(server: Server) -> None:
    carry = {**GROUP, "carry": "resume", "policy": {"name": "auto", "most_stale": 0}}
    assert sizes(server, {"prompts": prompts(2, 4), "num_groups": 2, **carry}) == [4] * 2
    assert sizes(server, {"prompts": [], "carried": True, **carry}) == [4] * 2


@pytest.mark.parametrize("rule", ["restart", "finish"])
def test_known_images_are_generated_during_and_after_an_update(server: Server, model: Path, rule: str) -> None:
    known = prompts(3, 2)
    sizes(server, {"prompts": known, **GROUP})
    chat = {**known[0], "model": "tiny", "max_tokens": 8}

    def push() -> None:
        url = f"{server.url}/darts/v1/weights"
        weights = (model / "model.safetensors").read_bytes()
        httpx.put(url, params={"rule": rule}, content=weights, timeout=120).raise_for_status()

    def is_updating() -> bool:
        state = httpx.get(f"{server.url}/darts/v1/weights").json()["state"]
        return bool(state != "serving")

    with ThreadPoolExecutor(4) as threads:
        started = server.metric(STARTED)
        running = threads.submit(sizes, server, {"prompts": known, **LONG})
        wait_counted(server, STARTED, started + 16)
        update = threads.submit(push)
        while not (is_updating() or update.done()):
            time.sleep(0.01)
        waiting = threads.submit(sizes, server, {"prompts": known, **GROUP})
        answers = [
            threads.submit(httpx.post, f"{server.url}/v1/chat/completions", json={**chat, "n": n}, timeout=120)
            for n in (1, 4)
        ]
        assert running.result() == [8] * 2
        update.result()
        assert waiting.result() == [4] * 2
        assert [len(answer.result().raise_for_status().json()["choices"]) for answer in answers] == [1, 4]
