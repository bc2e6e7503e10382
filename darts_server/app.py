"""The only wiring: builds the rooms from settings and joins them."""

from collections.abc import Sequence

from fastapi import FastAPI

from darts_server.control import Control
from darts_server.http import errors
from darts_server.http.group_id import GroupIdHeader
from darts_server.http.headers import read_options
from darts_server.http.routes import router
from darts_server.metrics import Metrics, Sources
from darts_server.rollout.bias import LengthBias
from darts_server.rollout.latency import Latency
from darts_server.rollout.prompts import KIND, Prompts
from darts_server.rollout.provenance import Provenance
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.submission import Submissions
from darts_server.settings import Settings
from darts_server.store import Store
from darts_server.vllm import server
from darts_server.vllm.engine import VllmPort, VllmPrompts, VllmRollouts, VllmSubmissions


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
    prompts, provenance, control = Prompts(store), Provenance(), Control(settings)
    submissions: VllmSubmissions | None = None

    def native() -> VllmSubmissions:
        assert submissions is not None, "the server answers only when its engine runs"
        return submissions

    def rollouts(engine: VllmPort, prompter: VllmPrompts, model_name: str) -> VllmRollouts:
        nonlocal submissions
        latency, bias = Latency(store, engine.capacity), LengthBias()
        sources = Sources(
            tracked=lambda: store.count(KIND),
            fault=lambda: store.fault is not None,
            step_seconds=latency.step_seconds,
            mean_length=bias.mean,
            length_quantile=bias.quantile,
            budget_aversion=lambda: control.settings.budget_aversion,
            lost_share=lambda: made.losses.share,
            deadline_stretch=lambda: made.losses.stretch,
        )
        made: VllmRollouts = Rollouts(
            engine,
            *control.configuration(),
            documents=store,
            observers=(Metrics(model_name, sources), provenance, bias),
            peek_interval=settings.peek_interval,
            batch_window=settings.batch_window,
            group_wait=settings.group_wait,
            latency=latency,
        )
        control.drive(made)
        submissions = Submissions(made, prompter, control.planner)
        return made

    def extend(app: FastAPI, keys: Sequence[str]) -> None:
        errors.install(app)
        app.add_middleware(GroupIdHeader)
        app.include_router(router(provenance, prompts, store, control, native, keys))

    return server.Wiring(rollouts=rollouts, read_options=read_options, extend=extend)
