"""The only wiring: builds the rooms from settings and joins them."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import FastAPI

from darts_server.http import errors
from darts_server.http.group_id import GroupIdHeader
from darts_server.http.headers import read_options
from darts_server.http.routes import router
from darts_server.metrics import Metrics
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.prompts import KIND, Prompts
from darts_server.rollout.provenance import Provenance
from darts_server.rollout.rollouts import Limits, Rollouts
from darts_server.settings import Settings
from darts_server.store import Store
from darts_server.vllm import server
from darts_server.vllm.engine import VllmPort, VllmRollouts


def serve(settings: Settings, vllm_argv: Sequence[str]) -> int:
    """Serve with vLLM's own flags in ``vllm_argv``; the process's exit code.

    Raises:
        StateError: what was learned before cannot be read; it was not touched.
    """
    args = server.parse(vllm_argv)
    with Store(settings.state_dir) as store:
        return server.serve(args, wiring(settings, store))


def wiring(settings: Settings, store: Store) -> server.Wiring:
    """How the server's parts are made from the settings."""
    prompts, provenance = Prompts(store), Provenance()

    def rollouts(engine: VllmPort, model_name: str) -> VllmRollouts:
        return Rollouts(
            engine,
            policies={"uniform": shaping(settings), "darts": replace(shaping(settings), adaptive=True)},
            default_policy=settings.policy,
            limits=Limits(settings.max_group_size, settings.group_size),
            prompts=prompts,
            observers=(Metrics(model_name, tracked=lambda: store.count(KIND)), provenance),
            peek_interval=settings.peek_interval,
            batch_window=settings.batch_window,
        )

    def extend(app: FastAPI, keys: Sequence[str]) -> None:
        errors.install(app)
        app.add_middleware(GroupIdHeader)
        app.include_router(router(provenance, prompts, keys))

    return server.Wiring(rollouts=rollouts, read_options=read_options, extend=extend)


def shaping(settings: Settings) -> Shaping:
    """The policy ``uniform`` as the settings want it; ``darts`` is its adaptive form."""
    return Shaping(
        redundancy=settings.redundancy,
        num_shortest=settings.num_shortest,
        num_longest=settings.num_longest,
        tail=Tail(settings.tail),
        max_redundancy=settings.max_redundancy,
    )
