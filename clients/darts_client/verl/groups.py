"""Which group a request of an agent loop belongs to.

veRL's server sees a prompt and a random id. `AgentLoopWorker._run_agent_loop` knows the prompt's name, its step, and
whether it is for validation. veRL has no setting for a client class, so `replace_methods` replaces three methods.
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
class PromptContext:
    """Headers of a prompt's requests, and the id of its group or None."""

    headers: dict[str, str]
    group: str | None = None


current_prompt_context: ContextVar[PromptContext] = ContextVar("darts_prompt", default=PromptContext({}))  # noqa: B039


def make_prompt_context(trajectory: dict[str, Any], fields: dict[str, Any], rollout: Any) -> PromptContext:
    if trajectory["validate"]:
        return PromptContext({"X-Darts-Policy": "off"})
    if rollout.n == 1:
        return PromptContext({})
    # `uid` is new for each use of a prompt. Only callers other than veRL's trainers lack it.
    prompt_id = fields.get("uid", trajectory["sample_index"])
    # A semicolon separates the parts of the header.
    group = f"{trajectory['step']}-{prompt_id}".replace(";", "_")[:NAME_CHARS]
    return PromptContext({"X-Darts-Group": f"id={group};size={rollout.n}"}, group)


def replace_methods() -> None:
    run_agent_loop = AgentLoopWorker._run_agent_loop
    generate = LLMServerClient.generate
    acquire_server = LLMServerClient._acquire_server

    @wraps(run_agent_loop)
    async def run_with_prompt(self: Any, sampling_params: Any, trajectory: Any, **fields: Any) -> Any:
        context = make_prompt_context(trajectory, fields, self.config.actor_rollout_ref.rollout)
        token = current_prompt_context.set(context)
        try:
            return await run_agent_loop(self, sampling_params, trajectory, **fields)
        finally:
            current_prompt_context.reset(token)

    @wraps(generate)
    async def generate_with_headers(self: Any, request_id: Any, **arguments: Any) -> Any:
        if self.config.actor_rollout_ref.rollout.name == "darts":
            # veRL uses the same id for all turns of a trajectory.
            arguments["headers"] = current_prompt_context.get().headers | {"X-Session-ID": str(request_id)}
            # This client itself requests the rest of an aborted answer.
            arguments["client_resumes"] = isinstance(self, FullyAsyncLLMServerClient)
        return await generate(self, request_id, **arguments)

    @wraps(acquire_server)
    async def acquire_by_group(self: Any, request_id: str, **fields: Any) -> Any:
        rollout = self.config.actor_rollout_ref.rollout
        # veRL's balancer sends equal ids to one server, which a group needs. A router of the user's own decides itself.
        if rollout.name == "darts" and not rollout.get("router_config_path"):
            request_id = current_prompt_context.get().group or request_id
        return await acquire_server(self, request_id, **fields)

    AgentLoopWorker._run_agent_loop = run_with_prompt
    LLMServerClient.generate = generate_with_headers
    LLMServerClient._acquire_server = acquire_by_group
