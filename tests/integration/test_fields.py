"""Every request form has the same fields, however its trajectories are served: as one group, joined, or raw."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from darts_server.demo.server import Server
from tests.integration.fields import read_fields
from tests.integration.trainer_requests import FORMS, TOKENS, Request, Trajectory

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
SIZE = 8
GROUP = {"X-Darts-Group": f"size={SIZE}"}
RAW = {"X-Darts-Policy": "off"}


def responses(trajectory: Trajectory) -> Request:
    return "v1/responses", {"model": "tiny", "input": trajectory.prompt, "max_output_tokens": TOKENS}, {}


def messages(trajectory: Trajectory) -> Request:
    return "v1/messages", {"model": "tiny", "messages": trajectory.messages, "max_tokens": TOKENS}, {}


ALL: dict[str, Callable[[Trajectory], Request]] = {
    **{name: form for name, form in FORMS.items() if not name.startswith("streamed")},
    "responses": responses,
    "messages": messages,
}
STREAMED = ("text_chat", "tokens_route", "completions", "responses", "messages")
CASES = [*((form, False) for form in ALL), *((form, True) for form in STREAMED)]


@pytest.mark.parametrize(("form", "stream"), CASES, ids=[f"{form}{'-streamed' * stream}" for form, stream in CASES])
async def test_fields_are_the_same_for_one_request_for_single_ones_and_raw(
    server: Server, form: str, stream: bool
) -> None:
    number = CASES.index((form, stream))
    prompt = f"{number % 10}a+{number // 10}b*7c>"
    opening = [7, 8, 9, 10, 3 + number % 10, 3 + number // 10]
    path, body, headers = ALL[form](
        Trajectory(f"{form}-{stream}-fields", 1, prompt, opening, [{"role": "user", "content": prompt}])
    )
    if stream:
        body["stream"] = True
    where = body.get("sampling_params", body)
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:

        async def fields(more: dict[str, str], n: int = 1) -> frozenset[str]:
            if n > 1:
                where["n"] = n
            answer = await client.post(f"/{path}", json=body, headers=headers | more)
            where.pop("n", None)
            assert answer.status_code == 200, answer.text
            return read_fields(answer)

        before = server.metric("darts_groups_total")
        raw = await fields(RAW)
        assert server.metric("darts_groups_total") == before
        assert await asyncio.gather(*(fields(GROUP) for _ in range(SIZE))) == [raw] * SIZE
        assert server.metric("darts_groups_total") == before + 1
        if form not in ("responses", "messages"):  # they have no n
            assert await fields(RAW, SIZE) == raw
            assert await fields({}, SIZE) == raw
            assert server.metric("darts_groups_total") == before + 2
