"""Session groups in TRL's asynchronous trainer: `AsyncGRPOTrainer(..., rollout_worker=SessionWorker(...))`.

`num_generations` sessions of each prompt start, and `SIZE` of them are trained on. TRL leaves out the others, if the
reward functions return None for an empty completion.
"""

import asyncio
from contextvars import ContextVar
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

SIZE = 4
EMPTY: Any = ([], [], [], 0, 0, None)
session_path: ContextVar[str] = ContextVar("session_path")


class SessionLoop(_AsyncRolloutLoop):  # type: ignore[misc, unused-ignore]  # Any without trl
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._groups: dict[int, asyncio.Task[list[str]]] = {}

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        # TRL numbers its groups, and runs each trajectory in a task of its own.
        if group_id not in self._groups:
            self._groups[group_id] = asyncio.create_task(self._create_group())
        path = (await self._groups[group_id]).pop()
        session_path.set(path)
        result = await super()._generate_one(prompt, tool_dict, tools, group_id)
        await self._call("POST", f"{path}:end", json={})
        after = 0
        while (state := await self._call("GET", path))["selected"] is None:
            after = (await self._call("GET", f"{path}/events", params={"after": after}))["next"]
        return result if state["selected"] else EMPTY

    async def _create_group(self) -> list[str]:
        # TRL sends a request again after an error, so the turns of a stopped session get empty answers.
        body = {"size": SIZE, "extra": self.num_generations - SIZE, "over_status": 200, "stopped_as": "length"}
        group = await self._call("POST", "/darts/v1/sessions", json=body)
        return [f"/darts/v1/sessions/{session['id']}" for session in group["sessions"]]

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        return await super()._post(session_path.get() + path, payload, timeout, max_retries)

    async def _call(self, method: str, path: str, **request: Any) -> Any:
        assert self.session is not None
        async with self.session.request(method, self.vllm_server_url + path, **request) as response:
            response.raise_for_status()
            return await response.json()


class SessionWorker(AsyncRolloutWorker):  # type: ignore[misc, unused-ignore]
    _loop_cls = SessionLoop
