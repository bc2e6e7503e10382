"""The only wiring: builds the rooms from settings and joins them."""

from collections.abc import Sequence

from fastapi import FastAPI

from darts_server.control import Control
from darts_server.engine.gate import Gate
from darts_server.http import errors
from darts_server.http.group_id import GroupIdHeader
from darts_server.http.headers import read_options
from darts_server.http.routes import router
from darts_server.metrics import Metrics, Sources, WeightMetrics
from darts_server.rollout.batches import Batches, Keeping
from darts_server.rollout.bias import LengthBias
from darts_server.rollout.feedback import Feedback
from darts_server.rollout.latency import Latency
from darts_server.rollout.prompts import KIND, Prompts
from darts_server.rollout.provenance import Provenance
from darts_server.rollout.rewards import Rewards
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.submission import Submissions
from darts_server.settings import Settings
from darts_server.store import Store
from darts_server.vllm import server
from darts_server.vllm.engine import VllmBatches, VllmPort, VllmPrompts, VllmRollouts
from darts_server.weights.port import Model
from darts_server.weights.staging import Staging
from darts_server.weights.updates import Limits, Rule, Updates


def serve(settings: Settings, vllm_argv: Sequence[str]) -> int:
    """Serve with vLLM's own flags in ``vllm_argv``; the process's exit code.

    Raises:
        StateError: what was learned before cannot be read; it was not touched.
    """
    args = server.parse(vllm_argv)
    with Store(settings.state_dir) as store, Staging(settings.weights_staging) as staging:
        return server.serve(args, wiring(settings, store, staging))


def wiring(settings: Settings, store: Store, staging: Staging) -> server.Wiring:
    """How the server's parts are made from the settings."""
    prompts, rewards, provenance, control = Prompts(store), Rewards(store), Provenance(), Control(settings)
    batches: VllmBatches | None = None
    feedback: Feedback | None = None
    weights: Updates | None = None
    gate = Gate()

    def native() -> VllmBatches:
        assert batches is not None, "the server answers only when its engine runs"
        return batches

    def reports() -> Feedback:
        assert feedback is not None, "the server answers only when its engine runs"
        return feedback

    def rollouts(engine: VllmPort, prompter: VllmPrompts, model_name: str) -> VllmRollouts:
        nonlocal batches, feedback
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
            pass_rate=lambda: rewards.dataset.pass_rate,
            answer_length=rewards.mean_length,
            pattern_difference=lambda: rewards.dataset.difference.tokens,
            pattern_error=lambda: rewards.dataset.difference.error,
        )
        metrics = Metrics(model_name, sources)
        feedback = Feedback(rewards, lambda record, right: made.rewarded(record, right), metrics)
        made: VllmRollouts = Rollouts(
            engine,
            *control.configuration(),
            documents=store,
            observers=(metrics, provenance, bias, feedback),
            peek_interval=settings.peek_interval,
            batch_window=settings.batch_window,
            group_wait=settings.group_wait,
            latency=latency,
            on_return=feedback.trajectory_returned,
            gate=gate,
        )
        control.drive(made)
        keeping = Keeping(settings.resume_seconds, settings.kept_seconds, settings.kept_batches)
        batches = Batches(Submissions(made, prompter, control.planner), keeping, settings.peek_interval)
        return made

    def updates(model: Model, model_name: str) -> Updates:
        nonlocal weights
        limits = Limits(Rule(settings.weights_rule), settings.weights_wait, settings.weights_timeout)
        weights = Updates(model, gate, staging, settings.weights_root, limits, [WeightMetrics(model_name)])
        return weights

    def served() -> Updates:
        assert weights is not None, "the server answers only when its engine runs"
        return weights

    def extend(app: FastAPI, keys: Sequence[str]) -> None:
        errors.install(app)
        app.add_middleware(GroupIdHeader)
        app.include_router(router(provenance, prompts, rewards, store, control, native, reports, served, keys))

    return server.Wiring(rollouts=rollouts, read_options=read_options, extend=extend, updates=updates, gate=gate)
