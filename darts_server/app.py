"""The only wiring: builds the rooms from settings and joins them."""

from collections.abc import Sequence

from vllm.outputs import RequestOutput

from darts_server.engine.port import Engine
from darts_server.http import errors
from darts_server.http.headers import read_options
from darts_server.metrics import Metrics
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.rollouts import Limits, Rollouts
from darts_server.settings import Settings
from darts_server.vllm import server
from darts_server.vllm.engine import PromptRequest


def serve(settings: Settings, vllm_argv: Sequence[str]) -> int:
    """Serve with vLLM's own flags in ``vllm_argv``; the process's exit code."""
    return server.serve(server.parse(vllm_argv), wiring(settings))


def wiring(settings: Settings) -> server.Wiring:
    """How the server's parts are made from the settings."""

    def rollouts(
        engine: Engine[PromptRequest, RequestOutput], model_name: str
    ) -> Rollouts[PromptRequest, RequestOutput]:
        return Rollouts(
            engine,
            policies={"uniform": shaping(settings)},
            default_policy=settings.policy,
            limits=Limits(settings.max_group_size, settings.group_size),
            observer=Metrics(model_name),
            peek_interval=settings.peek_interval,
        )

    return server.Wiring(rollouts=rollouts, read_options=read_options, extend=errors.install)


def shaping(settings: Settings) -> Shaping:
    """The policy ``uniform`` as the settings want it."""
    return Shaping(
        redundancy=settings.redundancy,
        num_shortest=settings.num_shortest,
        num_longest=settings.num_longest,
        tail=Tail(settings.tail),
    )
