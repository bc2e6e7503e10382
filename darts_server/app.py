"""The only wiring: builds the rooms from settings and joins them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import FastAPI

from darts_server.control import Control
from darts_server.doctor import findings
from darts_server.doctor.findings import Finding
from darts_server.doctor.serving import check_address, check_local, check_vllm
from darts_server.exceptions import DartsError, InvalidSetting
from darts_server.http import errors, page
from darts_server.http.body import BodyLimits
from darts_server.http.resources.monitor import Viewed
from darts_server.http.routes import router
from darts_server.http.security.access import Access, Keys, check_listening
from darts_server.http.security.middleware import SecurityMiddleware
from darts_server.http.shaping.group_id import GroupIdHeader
from darts_server.http.shaping.headers import read_options
from darts_server.journal import Journal
from darts_server.metrics import (
    AccessMetrics,
    QualityMetrics,
    QualitySources,
    RolloutMetrics,
    RolloutSources,
    WeightMetrics,
)
from darts_server.policy.allocation.brownout import Brownout
from darts_server.policy.pruning.calibration import Calibration
from darts_server.quality.remote import RemoteHead
from darts_server.quality.report import TrainerReport
from darts_server.rollout.batches.registry import BatchRegistry, Keeping
from darts_server.rollout.batches.submission import Submissions
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.prompts import KIND, Prompts
from darts_server.rollout.learned.rewards import Rewards
from darts_server.rollout.observers.base import GroupObserver
from darts_server.rollout.observers.bias import LengthBias
from darts_server.rollout.observers.feedback import Feedback
from darts_server.rollout.observers.monitor import Monitor
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.pruning.pruner import Pruner
from darts_server.rollout.pruning.score_kinds import ScoreKind, ScoringSettings
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.voting.confidence import Confidence
from darts_server.rollout.voting.runner import VoteRunner
from darts_server.serving.admission import Admission, Bounds, most_queued
from darts_server.serving.gate import Gate
from darts_server.serving.lifecycle import Life
from darts_server.settings import Settings
from darts_server.store import Store
from darts_server.types import GroupRecord
from darts_server.vllm import server
from darts_server.vllm.engine import VllmBatches, VllmPort, VllmPrompts, VllmRollouts, VllmVoteRunner
from darts_server.vllm.life import Living
from darts_server.weights.coordinator import Rule, UpdateSettings
from darts_server.weights.port import Groups, Model
from darts_server.weights.pull import AllowedHosts
from darts_server.weights.staging import Staging
from darts_server.weights.updates import Updates

T = TypeVar("T")


@dataclass
class Late(Generic[T]):
    """A part that is made when the engine runs; called, it is that part."""

    part: T | None = None

    def __call__(self) -> T:
        assert self.part is not None, "the server answers only when its engine runs"
        return self.part


def serve(settings: Settings, vllm_argv: Sequence[str]) -> int:
    """Serve with vLLM's own flags in ``vllm_argv``; the process's exit code.

    Raises:
        StateError: what was learned before cannot be read; it was not touched.
    """
    args = server.parse(vllm_argv)
    if failing := findings.failing(check_local(settings, args)):
        raise InvalidSetting("\n".join(map(str, failing)))
    access = _access(settings, server.taken_keys(args))
    if getattr(args, "uds", None) is None:  # a Unix socket is for this machine alone
        check_listening(args.host, access, settings.allow_unauthenticated)
    with Store(settings.state_dir) as store, Staging(settings.weights_staging) as staging, ExitStack() as closing:
        return server.serve(args, wiring(settings, access, store, staging, closing, server.traces(args)))


def examine(settings: Settings, vllm_argv: Sequence[str]) -> Iterator[Finding]:
    """Say of everything that a server needs whether it is there. Nothing is started."""
    args = server.parse(vllm_argv)
    yield from check_local(settings, args)
    try:
        yield check_address(args, _access(settings, server.taken_keys(args)), settings.allow_unauthenticated)
    except InvalidSetting as error:
        yield findings.fail("keys", str(error))
    yield from check_vllm(args, has_model=bool(args.model_tag) or "--model" in vllm_argv)


def _access(settings: Settings, keys: Sequence[str]) -> Access:
    admin_keys = [] if settings.admin_api_key is None else [settings.admin_api_key.get_secret_value()]
    access = Access(
        Keys(keys, settings.api_key_file),
        Keys(admin_keys, settings.admin_api_key_file),
        settings.allow_dangerous_routes,
    )
    if settings.max_candidates_per_key is not None and not access.keys:
        raise InvalidSetting("--max-candidates-per-key needs API keys: set VLLM_API_KEY or --api-key-file")
    return access


def wiring(
    settings: Settings,
    access: Access,
    store: Store,
    staging: Staging,
    closing: ExitStack,
    traces: Sequence[GroupObserver] = (),
) -> server.Wiring:
    """How the server's parts are made from the settings; those that have to be closed are put on ``closing``."""
    prompts, rewards, provenance, control = Prompts(store), Rewards(store), Provenance(), Control(settings)
    gate, life, journal = Gate(), Life(), Journal()
    batches, votes, feedback = Late[VllmBatches](), Late[VllmVoteRunner](), Late[Feedback]()
    weights, live, refusals = Late[Updates](), Late[Monitor](), Late[AccessMetrics]()

    def rollouts(engine: VllmPort, prompter: VllmPrompts, model_name: str) -> VllmRollouts:
        latency, bias, confidence = Latency(store, engine.capacity), LengthBias(), Confidence(store)
        sources = RolloutSources(
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
            redundancy_scale=lambda: made.redundancy_scale(),
        )
        metrics, refusals.part = RolloutMetrics(model_name, sources), AccessMetrics(model_name)
        pruner = _pruner(settings, control, engine, store, model_name)
        closing.callback(pruner.close)

        def rewarded(record: GroupRecord, right: Mapping[int, bool]) -> None:
            made.rewarded(record, right)
            pruner.record_rewarded_group()

        feedback.part = Feedback(rewards, rewarded, metrics, on_reward=[confidence.learn_reward, pruner.learn_reward])
        live.part = Monitor(lambda: made)
        bounds = Bounds(settings.max_queued_candidates or most_queued(engine.capacity), settings.max_candidates_per_key)
        made: VllmRollouts = Rollouts(
            engine,
            *control.configuration(),
            documents=store,
            observers=(metrics, provenance, bias, feedback.part, live.part, pruner, journal, *traces),
            peek_interval=settings.poll_interval,
            batch_window=settings.cohort_window,
            group_wait=settings.group_wait,
            latency=latency,
            on_return=feedback.part.trajectory_returned,
            gate=gate,
            admission=Admission(lambda: engine.unfinished, engine.capacity, bounds),
            brownout=Brownout.before(bounds.most_waiting or 0, engine.capacity or 0, settings.brownout),
            scorer=pruner,
        )
        control.drive(made)
        keeping = Keeping(settings.resume_seconds, settings.kept_seconds, settings.kept_batches)
        batches.part = BatchRegistry(Submissions(made, prompter, control.planner), keeping, settings.poll_interval)
        votes.part = VoteRunner(made, prompter, confidence, metrics)
        return made

    def updates(model: Model, groups: Groups, model_name: str) -> Updates:
        limits = UpdateSettings(Rule(settings.weights_rule), settings.weights_wait, settings.weights_timeout)
        observers = (WeightMetrics(model_name), journal)
        hosts = AllowedHosts(frozenset(filter(None, settings.weights_hosts.split(","))))
        weights.part = Updates(model, gate, staging, settings.weights_root, limits, observers, groups, hosts)
        return weights.part

    def extend(app: FastAPI) -> None:
        errors.install(app)
        app.add_middleware(GroupIdHeader)
        viewed = Viewed(live, rewards, weights, lambda: store.fault, stopping=lambda: server.stopping(app))
        app.include_router(
            router(
                provenance,
                prompts,
                rewards,
                store,
                control,
                batches,
                votes,
                feedback,
                weights,
                viewed,
                access.needs_key,
            )
        )
        app.include_router(page.routes())
        limits = BodyLimits(settings.max_body_bytes, flag="--max-body-bytes")
        app.add_middleware(
            SecurityMiddleware, access=access, limits=limits, on_refusal=refusals().refused, life=life
        )  # outermost

    def fail(error: DartsError) -> None:
        batches().fail(error)

    return server.Wiring(
        rollouts=rollouts,
        read_options=read_options,
        extend=extend,
        updates=updates,
        gate=gate,
        read_keys_again=access.reload_keys if settings.api_key_file or settings.admin_api_key_file else None,
        living=Living(
            settings.grace_seconds, settings.engine_watchdog, life, hurry=lambda: batches().hurry(), fail=fail
        ),
    )


def _pruner(settings: Settings, control: Control, engine: VllmPort, store: Store, model_name: str) -> Pruner:
    """What judges candidates under policies that prune. It has begun only if the default policy is one of these.

    Raises:
        InvalidSetting: the default policy prunes, and nothing can be scored.
    """
    calibration = Calibration(cold_steps=settings.cold_steps, cold_labels=settings.cold_labels)
    scoring_settings = ScoringSettings(
        detect_at=settings.detect_at,
        kind=ScoreKind(settings.quality),
        fallback=ScoreKind.LOGPROB if settings.quality_fallback == "logprob" else None,
        calibration=calibration.as_published if settings.calibration == "paper" else calibration,
        reward_threshold=settings.reward_threshold,
        soft=settings.soft_rewards,
    )
    sources = QualitySources(
        status=lambda: pruner.status,
        metric=lambda prediction, name: getattr(
            pruner.score_metrics() if prediction == "score" else pruner.calibrated_metrics(), name
        ),
        loss=lambda: pruner.report.loss,
    )
    metrics = QualityMetrics(model_name, sources)

    def new_head(width: int, keep: Callable[[bytes], None]) -> RemoteHead:
        def trained(report: TrainerReport, state: bytes) -> None:
            metrics.trained(report.made, report.seconds, report.divergences)
            keep(state)

        return RemoteHead(width, device=settings.quality_device, trained=trained)

    pruner = Pruner(
        scoring_settings,
        lambda: engine.probe_width,
        new_head,
        store,
        lambda: engine.weight_version,
        metrics,
        control.prunes,
    )
    if control.prunes(settings.policy):
        if engine.probe_width is None and pruner.uses_hidden_states:
            raise InvalidSetting(
                f"--policy {settings.policy} prunes by hidden states, which this engine cannot tell; score by "
                "log-probs with --quality logprob, or allow that with --quality-fallback logprob"
            )
        pruner.begin()
    return pruner
