"""Which group a request of an agent loop belongs to.

veRL's server sees a prompt and a random id. The prompt's name, its training step and whether it is for validation are
known to `AgentLoopWorker._run_agent_loop`, which runs one trajectory, and reach the trajectory's requests in a context
variable. veRL has no setting for a client class, so `install` replaces three methods. Other backends are not affected.
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
    """The prompt that the running agent loop answers. `size`: number of its trajectories."""

    group: str
    size: int
    is_validation: bool

    @property
    def is_grouped(self) -> bool:
        return self.size > 1 and not self.is_validation


@dataclass(frozen=True, slots=True)
class Origin:
    """What the server has to know about a request beside its tokens.

    `session`: veRL's request id, the same for all turns of a trajectory. `resumes`: whether the client continues an
    aborted answer itself.
    """

    session: str
    prompt: Prompt | None
    resumes: bool

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request to the server."""
        headers = {"X-Session-ID": self.session}
        if self.prompt is None:
            return headers
        if self.prompt.is_validation:
            headers["X-Darts-Policy"] = "off"
        elif self.prompt.is_grouped:
            headers["X-Darts-Group"] = f"id={self.prompt.group};size={self.prompt.size}"
        return headers


current_prompt: ContextVar[Prompt | None] = ContextVar("darts_prompt", default=None)


def describe_prompt(trajectory: dict[str, Any], fields: dict[str, Any], rollout: Any) -> Prompt:
    """Return the prompt of one trajectory. `fields`: the columns of the data set and veRL's own, such as `uid`."""
    is_validation = bool(trajectory["validate"])
    size = rollout.n
    if is_validation:
        size = rollout.val_kwargs.n
    # `uid` is new for each use of a prompt. Only callers other than veRL's trainers lack it.
    name = fields.get("uid", trajectory["sample_index"])
    # A semicolon separates the parts of the header.
    group = f"{trajectory['step']}-{name}".replace(";", "_")[:NAME_CHARS]
    return Prompt(group, int(size), is_validation)


def install() -> None:
    """Let agent loops pass the origin of their requests to servers of this backend."""
    run_agent_loop = AgentLoopWorker._run_agent_loop
    generate = LLMServerClient.generate
    acquire_server = LLMServerClient._acquire_server

    def is_served(holder: Any) -> bool:
        return str(holder.config.actor_rollout_ref.rollout.name) == "darts"

    @wraps(run_agent_loop)
    async def run_with_prompt(self: Any, sampling_params: Any, trajectory: Any, **fields: Any) -> Any:
        if not is_served(self):
            return await run_agent_loop(self, sampling_params, trajectory, **fields)
        prompt = describe_prompt(trajectory, fields, self.config.actor_rollout_ref.rollout)
        token = current_prompt.set(prompt)
        try:
            return await run_agent_loop(self, sampling_params, trajectory, **fields)
        finally:
            current_prompt.reset(token)

    @wraps(generate)
    async def generate_with_origin(self: Any, request_id: Any, **arguments: Any) -> Any:
        if is_served(self):
            resumes = isinstance(self, FullyAsyncLLMServerClient)
            arguments["origin"] = Origin(str(request_id), current_prompt.get(), resumes)
        return await generate(self, request_id, **arguments)

    @wraps(acquire_server)
    async def acquire_by_group(self: Any, request_id: str, **fields: Any) -> Any:
        prompt = current_prompt.get()
        # A router of the user's own decides by itself, and looks up the request id when the request ends.
        routes_itself = not is_served(self) or self.config.actor_rollout_ref.rollout.get("router_config_path")
        if prompt is not None and prompt.is_grouped and not routes_itself:
            # veRL's balancer sends equal ids to one server. A group needs all its trajectories on one server.
            request_id = prompt.group
        return await acquire_server(self, request_id, **fields)

    AgentLoopWorker._run_agent_loop = run_with_prompt
    LLMServerClient.generate = generate_with_origin
    LLMServerClient._acquire_server = acquire_by_group
