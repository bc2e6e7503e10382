"""Which group a request of an agent loop belongs to.

veRL's server sees a prompt and a random id. `AgentLoopWorker._run_agent_loop` knows the prompt's name, its step, and
whether it is for validation. veRL has no setting for a client class, so `install` replaces three methods.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

NAME_CHARS = 256
"""The server's limit for names."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt that the running agent loop answers. `group`: None if it is in no group."""

    headers: dict[str, str]
    group: str | None = None


current_prompt: ContextVar[Prompt] = ContextVar("darts_prompt", default=Prompt({}))  # noqa: B039


def describe_prompt(trajectory: dict[str, Any], fields: dict[str, Any], rollout: Any) -> Prompt:
    """Return the prompt of a trajectory. `fields`: the columns of the data set and veRL's own, such as `uid`."""
    if trajectory["validate"]:
        return Prompt({"X-Darts-Policy": "off"})
    if rollout.n == 1:
        return Prompt({})
    # `uid` is new for each use of a prompt. Only callers other than veRL's trainers lack it.
    name = fields.get("uid", trajectory["sample_index"])
    # A semicolon separates the parts of the header.
    group = f"{trajectory['step']}-{name}".replace(";", "_")[:NAME_CHARS]
    return Prompt({"X-Darts-Group": f"id={group};size={rollout.n}"}, group)


def install() -> None:
    """Let agent loops tell the servers of this backend where their requests belong."""
    run_agent_loop = AgentLoopWorker._run_agent_loop
    generate = LLMServerClient.generate
    acquire_server = LLMServerClient._acquire_server

    @wraps(run_agent_loop)
    async def run_with_prompt(self: Any, sampling_params: Any, trajectory: Any, **fields: Any) -> Any:
        prompt = describe_prompt(trajectory, fields, self.config.actor_rollout_ref.rollout)
        token = current_prompt.set(prompt)
        try:
            return await run_agent_loop(self, sampling_params, trajectory, **fields)
        finally:
            current_prompt.reset(token)

    @wraps(generate)
    async def generate_with_headers(self: Any, request_id: Any, **arguments: Any) -> Any:
        if self.config.actor_rollout_ref.rollout.name == "darts":
            # The same id for all turns of a trajectory.
            arguments["headers"] = current_prompt.get().headers | {"X-Session-ID": str(request_id)}
            arguments["resumes"] = isinstance(self, FullyAsyncLLMServerClient)
        return await generate(self, request_id, **arguments)

    @wraps(acquire_server)
    async def acquire_by_group(self: Any, request_id: str, **fields: Any) -> Any:
        rollout = self.config.actor_rollout_ref.rollout
        # veRL's balancer sends equal ids to one server, which a group needs. A router of the user's own decides itself.
        if rollout.name == "darts" and not rollout.get("router_config_path"):
            request_id = current_prompt.get().group or request_id
        return await acquire_server(self, request_id, **fields)

    AgentLoopWorker._run_agent_loop = run_with_prompt
    LLMServerClient.generate = generate_with_headers
    LLMServerClient._acquire_server = acquire_by_group
