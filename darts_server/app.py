"""Builds all rooms from the settings and connects them, in the order of a server's life."""

import logging
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI

from darts_server.control import Control
from darts_server.drafts.history import History
from darts_server.exceptions import InvalidSetting, StateError
from darts_server.http import dialects, errors, page
from darts_server.http.body import BodyLimits
from darts_server.http.dialects import Controls
from darts_server.http.options import merge_options, read_options
from darts_server.http.resources.monitor import MonitorSources
from darts_server.http.routes import create_router, share_answers
from darts_server.http.security.access import Access, Keys, Sites, check_listening
from darts_server.http.security.first_error import end_at_first_error
from darts_server.http.security.heads import LimitedHttp
from darts_server.http.security.json_bodies import limit_json
from darts_server.http.security.middleware import SecurityMiddleware
from darts_server.http.security.session_paths import SessionPaths
from darts_server.http.webhook import Webhook
from darts_server.logs import log_announced_update, log_cohort, log_group, log_ready, log_start, log_update
from darts_server.metrics.collectors import (
    DRAFT_SOURCES,
    AccessMetrics,
    Reads,
    ServingMetrics,
    WeightMetrics,
    hide_creation_times,
)
from darts_server.metrics.quality import METRICS, QualityMetrics
from darts_server.metrics.rollouts import QUANTILES, RolloutMetrics
from darts_server.metrics.sessions import SessionMetrics
from darts_server.metrics.verifiers import VerifierMetrics
from darts_server.observers import UpdateEvents
from darts_server.policy.allocation import Brownout
from darts_server.quality.remote import RemoteHead
from darts_server.quality.types import TrainerReport
from darts_server.records import GroupRecord
from darts_server.rollout.batches.carried import CarryLimits, SavedPrompts
from darts_server.rollout.batches.registry import BatchRegistry, BatchRetention
from darts_server.rollout.learned.statistics import KIND, LengthBias, Statistics
from darts_server.rollout.observers.monitor import Monitor
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import RewardMatcher
from darts_server.rollout.pruning.pruner import Pruner
from darts_server.rollout.pruning.scoring import ScoreKind, ScoringSettings
from darts_server.rollout.rollouts import Intervals, Rollouts, check_document
from darts_server.rollout.sessions.registry import SessionRegistry
from darts_server.rollout.voting import Confidence, VoteRunner
from darts_server.serving.admission import MIN_QUEUE, QUEUE_ROUNDS, AdmissionLimits
from darts_server.serving.lifecycle import Lifecycle
from darts_server.serving.loop_lag import watch_loop
from darts_server.settings import Settings
from darts_server.settings.fields import ENV_PREFIX
from darts_server.startup_checks import Finding, Verdict, check_address, check_local, check_vllm, fail
from darts_server.store import NumberedFile, Store
from darts_server.verify.specs import parse_specs
from darts_server.verify.verifiers import VerifierLimits, Verifiers
from darts_server.vllm import flags
from darts_server.vllm.api import server
from darts_server.vllm.api.engine import VllmBatches, VllmPort, VllmRollouts, VllmVoteRunner
from darts_server.vllm.api.launch import RunningEngine, start_engine, start_fleet
from darts_server.vllm.api.shutdown import (
    STATE_LOST,
    Shutdown,
    exit_code,
    exit_on_signals,
    handle_sighup,
    set_grace_seconds,
)
from darts_server.weights.port import WAIT_FACTOR, Rule, UpdateSettings
from darts_server.weights.staging import Staging
from darts_server.weights.updates import Updates

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.db"


@dataclass(frozen=True, slots=True)
class Rooms:
    """The objects above the engine that routes use."""

    store: Store
    provenance: Provenance
    rollouts: VllmRollouts
    reward_matcher: RewardMatcher
    monitor: Monitor
    batches: VllmBatches
    votes: VllmVoteRunner
    sessions: SessionRegistry
    updates: Updates
    control: Control
    dialect_controls: Controls


# --- settings, keys and files ---------------------------------------------------


def serve(settings: Settings, vllm_argv: Sequence[str]) -> int:
    """Serve, and return the process's exit code.

    Raises:
        InvalidSetting
        StateError: the state folder cannot be read; it was not touched.
    """
    hide_creation_times()
    vllm_argv = _add_sampling_flags(settings, vllm_argv)
    args = flags.parse(vllm_argv)
    failures = [str(finding) for finding in check_local(settings, args) if finding.verdict is Verdict.FAIL]
    if failures:
        raise InvalidSetting("\n".join(failures))

    access = _make_access(settings, args)
    # Only this machine reaches a Unix socket.
    if args.uds is None:
        check_listening(args.host, access, settings.allow_unauthenticated)

    with Store(settings.state_dir, check=check_document) as store:
        # Without drafts the file is neither made nor changed.
        folder = settings.state_dir if settings.speculate == "auto" else None
        with Staging(settings.weights_staging) as staging, NumberedFile(folder, HISTORY_FILE) as kept_answers:
            code = server.run(args, lambda: _serve(settings, args, vllm_argv, access, store, kept_answers, staging))
        # The last tasks of the event loop may still write, so the store is closed after the loop.
        return close_store(store, code)


def _add_sampling_flags(settings: Settings, vllm_argv: Sequence[str]) -> list[str]:
    return flags.add_sampling_flags(
        vllm_argv, speculate=settings.speculate == "auto", couple=settings.sampling == "coupled"
    )


def close_store(store: Store, server_code: int) -> int:
    try:
        store.close()
    except StateError as error:
        logger.critical("what was learned last is lost: %s", error)
        # An error of the server itself counts more.
        return server_code or STATE_LOST
    return server_code


def _make_access(settings: Settings, args: Namespace) -> Access:
    admin_keys = []
    if settings.admin_api_key is not None:
        admin_keys.append(settings.admin_api_key.get_secret_value())
    # The engine's processes must not inherit the admin key, and `take_api_keys` removes the other keys.
    for name in list(os.environ):
        if name.upper() == f"{ENV_PREFIX}ADMIN_API_KEY":
            del os.environ[name]

    # Browsers, which may send requests of foreign web pages, cannot reach a Unix socket.
    hosts = ["*"]
    if not args.uds:
        hosts = [args.host, *filter(None, settings.allowed_hosts.split(","))]
    access = Access(
        Keys(server.take_api_keys(args), settings.api_key_file),
        Keys(admin_keys, settings.admin_api_key_file),
        settings.allow_dangerous_routes,
        Sites(hosts, args.allowed_origins),
    )
    if settings.max_candidates_per_key is not None and not access.keys:
        raise InvalidSetting("--max-candidates-per-key needs API keys: set VLLM_API_KEY or --api-key-file")
    return access


# --- the server, from the first signal handler to the exit code -----------------


async def _serve(
    settings: Settings,
    args: Namespace,
    vllm_argv: Sequence[str],
    access: Access,
    store: Store,
    kept_answers: NumberedFile,
    staging: Staging,
) -> int:
    """Serve until a signal or the loss of the engine."""
    exit_on_signals()
    grace = set_grace_seconds(args, settings.grace_seconds)
    lifecycle = Lifecycle()
    # `closing` ends other threads, and the process that trains the head, after the engine and the verifiers.
    with server.bind_socket(args) as sock, ExitStack() as closing:
        async with AsyncExitStack() as running:
            # Verifiers start before the engine, which takes minutes, so that wrong code is found at once.
            verifiers = await running.enter_async_context(_start_verifiers(settings))
            log_start(args.model)
            engine = await running.enter_async_context(_start_engines(settings, args, vllm_argv))
            rooms = make_rooms(settings, engine, access, store, staging, closing, verifiers)
            reload_keys = None
            if settings.api_key_file or settings.admin_api_key_file:
                reload_keys = partial(_reload_keys, access, rooms.batches)
            handle_sighup(reload_keys)
            if settings.session_webhook is not None:
                webhook = await running.enter_async_context(Webhook(settings.session_webhook).run_senders())
                rooms.rollouts.observers.session_event.add(webhook.send)

            # Requests become groups, and vLLM's app gets our routes.
            engine.renderer.reuses_streams = settings.reuse_streams
            engine.serve_groups(rooms.rollouts, merge_options, rooms.updates)
            engine.llm.sessions = rooms.sessions
            history = None
            if settings.speculate == "auto":
                history = _restore_history(settings, engine, kept_answers)
                if settings.history_bytes:
                    await running.enter_async_context(engine.keep_answers(history))
            extensions = dialects.body_extensions(settings.dialect)
            application = await server.make_app(engine.llm, args, read_options, errors.error_fields, extensions)
            extend_app(application, rooms, settings, access, lifecycle, engine.model_name)
            metrics = ServingMetrics(engine.model_name, _engine_metric_reads(engine, history))
            closing.enter_context(watch_loop(metrics.loop_lagged))

            # Several engines have watchdogs of their own, which start an engine again.
            watchdog = settings.engine_watchdog if settings.replicas is None else 0.0
            shutdown = Shutdown(lifecycle, engine.llm, rooms.batches, grace, watchdog)
            on_ready = partial(
                log_ready, server.url_of(args, sock), engine.model_name, settings.policy, settings.group_size
            )
            # This removes the saved prompts from the file, so it is the last step: if it is not reached, the next
            # server finds them.
            rooms.batches.restore_carried()
            try:
                await server.serve(application, args, sock, shutdown, LimitedHttp, on_ready)
            finally:
                lost_prompts = await rooms.batches.close()
    return exit_code(engine.llm, lifecycle, lost_prompts)


@asynccontextmanager
async def _start_verifiers(settings: Settings) -> AsyncIterator[Verifiers]:
    limits = VerifierLimits(
        settings.verifier_timeout,
        settings.verifier_processes,
        settings.verifier_requests,
        settings.verifier_memory,
    )
    verifiers = Verifiers(parse_specs(settings.verifier), limits, settings.verifier_default)
    try:
        await verifiers.start()
        yield verifiers
    finally:
        await verifiers.close()


def _restore_history(settings: Settings, engine: RunningEngine, kept_answers: NumberedFile) -> History:
    history = History(settings.history_bytes, kept_answers.put)
    num_dropped = history.restore(kept_answers.read(), engine.vocabulary_size)
    if num_dropped:
        logger.warning(
            "%d answers that were kept for drafts are damaged or of another model, and are dropped", num_dropped
        )
    return history


def _engine_metric_reads(engine: RunningEngine, history: History | None) -> Reads:
    held_requests = engine.llm.held_requests

    # `draft_totals` lists the drafted tokens of each source, and then the accepted tokens.
    def count_drafted(source: str) -> int:
        return held_requests.draft_totals[DRAFT_SOURCES.index(source)]

    def count_accepted(source: str) -> int:
        return held_requests.draft_totals[len(DRAFT_SOURCES) + DRAFT_SOURCES.index(source)]

    return {
        "darts_engines_up": lambda: engine.num_up,
        "darts_engines_lost_total": lambda: engine.num_lost,
        "darts_decode_steps_total": lambda: held_requests.decode_steps,
        "darts_draft_tokens_total": count_drafted,
        "darts_draft_accepted_tokens_total": count_accepted,
        "darts_history_bytes": lambda: None if history is None else history.bytes,
        "darts_history_prompts": lambda: None if history is None else history.prompts,
    }


def _start_engines(
    settings: Settings,
    args: Namespace,
    vllm_argv: Sequence[str],
) -> AbstractAsyncContextManager[RunningEngine]:
    if settings.replicas is None:
        return start_engine(args)
    # Imports Ray, which is optional.
    from darts_server.vllm.fleet.ray_hosts import Cluster

    cluster = Cluster(settings.ray_address, settings.gpus_per_replica)
    return start_fleet(args, vllm_argv, settings.replicas, cluster.place, cluster.host, settings.engine_watchdog)


def _reload_keys(access: Access, batches: VllmBatches) -> None:
    access.reload_keys()
    # No caller can continue the prompts of a key that was removed.
    batches.carried.drop_prompts_without_caller()


# --- the rooms above the engine -------------------------------------------------


def make_rooms(
    settings: Settings,
    engine: RunningEngine,
    access: Access,
    store: Store,
    staging: Staging,
    closing: ExitStack,
    verifiers: Verifiers,
) -> Rooms:
    """``closing`` closes the objects at the server's end."""
    port = engine.port
    verifiers.called.add(VerifierMetrics(engine.model_name, verifiers.names).called)

    # Policies, learned state, and groups.
    control = Control(settings)
    statistics = Statistics(store, port.capacity, port.num_engines)
    pruner = _make_pruner(settings, control, port, store, engine.model_name)
    closing.callback(pruner.close)
    max_waiting = settings.max_queued_candidates
    if max_waiting is None and port.capacity is not None:
        max_waiting = max(QUEUE_ROUNDS * port.capacity, MIN_QUEUE)
    rollouts: VllmRollouts = Rollouts(
        port,
        control.planner,
        statistics,
        Intervals(allocation=settings.cohort_window, join=settings.group_wait, join_named=settings.group_name_wait),
        gate=engine.llm.gate,
        admission_limits=AdmissionLimits(max_waiting, settings.max_candidates_per_key),
        brownout=Brownout.for_queue(max_waiting or 0, port.capacity or 0),
        scorer=pruner,
        verifier=verifiers,
    )
    control.connect(rollouts, engine.llm.set_drafting)

    # New weights.
    timeout = settings.weights_timeout
    update_events = UpdateEvents()
    update_events.announced.add(log_announced_update)
    update_events.ended.add(WeightMetrics(engine.model_name).update_ended, log_update)
    updates = Updates(
        engine.model,
        engine.llm.gate,
        staging,
        settings.weights_root,
        UpdateSettings(Rule(settings.weights_rule), wait_timeout=WAIT_FACTOR * timeout, step_timeout=timeout),
        update_events,
        rollouts,
    )

    # Batches, and the prompts that they carry over.
    batches: VllmBatches = BatchRegistry(
        rollouts,
        engine.renderer,
        control.new_planner,
        BatchRetention(kept_bytes=settings.kept_bytes),
        # A caller's batches may use half of `kept_bytes`, and its carried prompts as much again.
        carry_limits=CarryLimits(
            settings.carried_prompts,
            prompt_bytes=settings.kept_bytes // 2,
            staleness=settings.max_staleness,
        ),
        saved=None if settings.state_dir is None else SavedPrompts(store, engine.fingerprint),
        has_initial_weights=lambda: updates.loaded.are_initial,
        may_call=access.may_call,
    )

    sessions = SessionRegistry(rollouts, settings.session_idle, settings.kept_bytes)

    # Observers of groups, and rewards.
    bias = LengthBias()
    provenance = Provenance()
    monitor = Monitor(rollouts, sessions)
    confidence = Confidence(store)
    metrics = RolloutMetrics(engine.model_name, _rollout_metric_reads(rollouts, store, bias, batches))

    def learn_rewards(record: GroupRecord, correct: Mapping[int, bool], zero_variance: bool) -> None:
        metrics.group_rewarded(zero_variance)
        statistics.pass_rates.learn(record, correct)
        rollouts.allocator.deadlines.learn_rewards(record, correct)
        pruner.record_rewarded_group()

    on_reward = [confidence.learn_reward, pruner.learn_reward]
    reward_matcher = RewardMatcher(
        statistics.rewards,
        learn_rewards,
        metrics.rewards_reported,
        on_reward=on_reward,
    )
    events = rollouts.observers
    events.single_request_classified.add(metrics.single_request_classified)
    events.group_closed.add(metrics.group_closed)
    events.prompts_skipped.add(metrics.prompts_skipped)
    events.candidates_started.add(metrics.candidates_started)
    events.trajectory_returned.add(reward_matcher.trajectory_returned)
    events.trajectory_verified.add(reward_matcher.trajectory_verified)
    events.group_ended.add(
        metrics.group_ended,
        provenance.group_ended,
        bias.group_ended,
        reward_matcher.group_ended,
        monitor.group_ended,
        log_group,
    )
    events.scored_group_ended.add(pruner.group_ended)
    events.cohort_ended.add(metrics.cohort_ended, log_cohort)
    session_metrics = SessionMetrics(engine.model_name, {"darts_sessions_open": lambda: sessions.num_open})
    events.session_ended.add(session_metrics.session_ended)
    events.session_request_refused.add(session_metrics.request_refused)

    # Votes. The search for an answer in a text takes 3 seconds at most, so closing does not wait longer.
    answer_searches = ThreadPoolExecutor(1, "vote-answers")
    closing.callback(answer_searches.shutdown, cancel_futures=True)
    votes: VllmVoteRunner = VoteRunner(rollouts, engine.renderer, confidence, metrics.vote_ended, answer_searches)

    return Rooms(
        store,
        provenance,
        rollouts,
        reward_matcher,
        monitor,
        batches,
        votes,
        sessions,
        updates,
        control,
        Controls(updates, engine.llm, rollouts.turns, settings.allow_dangerous_routes),
    )


def _make_pruner(
    settings: Settings,
    control: Control,
    port: VllmPort,
    store: Store,
    model_name: str,
) -> Pruner:
    def read_metric(name: str, prediction: str) -> float | None:
        measured = pruner.score_metrics() if prediction == "score" else pruner.calibrated_metrics()
        value: float | None = getattr(measured, name)
        return value

    reads: Reads = {
        **{f"darts_quality_{name}": partial(read_metric, name) for name in METRICS},
        "darts_quality_loss": lambda: pruner.report.loss,
        "darts_quality_status": lambda status: pruner.status is status,
    }
    metrics = QualityMetrics(model_name, reads)

    def create_head(width: int, update_checkpoint: Callable[[bytes], None]) -> RemoteHead:
        def on_report(report: TrainerReport, state: bytes) -> None:
            metrics.trained(report.trained_steps, report.trained_seconds, report.divergences)
            update_checkpoint(state)

        return RemoteHead(width, on_report=on_report)

    pruner = Pruner(
        ScoringSettings(settings.detect_at, ScoreKind(settings.quality)),
        lambda: port.probe_width,
        create_head,
        store,
        lambda: port.weight_version,
        metrics,
    )
    shaping = control.planner.shaping(settings.policy)
    if shaping is not None and shaping.prunes:
        if port.probe_width is None and pruner.uses_hidden_states:
            raise InvalidSetting(
                f"--policy {settings.policy} prunes by hidden states, which this engine does not report; score by "
                "log-probs with --quality logprob"
            )
        pruner.start()
    return pruner


def _rollout_metric_reads(
    rollouts: VllmRollouts,
    store: Store,
    bias: LengthBias,
    batches: VllmBatches,
) -> Reads:
    statistics = rollouts.statistics
    deadlines = rollouts.allocator.deadlines
    rewards = statistics.rewards

    def read_length(kind: str, statistic: str) -> float | None:
        if statistic == "mean":
            return bias.mean(kind)
        return bias.quantile(kind, QUANTILES[statistic])

    return {
        "darts_prompts_tracked": lambda: store.count(KIND),
        "darts_store_fault": lambda: store.fault is not None,
        "darts_carried_prompts": lambda: batches.carried.num_prompts,
        "darts_carried_tokens": lambda: batches.carried.num_tokens,
        "darts_redundancy_scale": rollouts.redundancy_scale,
        "darts_observer_failures_total": lambda: rollouts.observers.failures,
        "darts_step_seconds": statistics.latency.step_seconds,
        "darts_start_seconds": lambda: statistics.latency.start_seconds,
        "darts_length_tokens": read_length,
        "darts_pass_rate": lambda: rewards.dataset.pass_rate,
        "darts_answer_length_tokens": rewards.mean_length,
        "darts_deadline_lost_share": deadlines.lost_share,
        "darts_deadline_lost_groups": deadlines.lost_group_share,
        "darts_deadline_factor": deadlines.deadline_factor,
    }


# --- our part of vLLM's app -----------------------------------------------------


def extend_app(
    application: FastAPI,
    rooms: Rooms,
    settings: Settings,
    access: Access,
    lifecycle: Lifecycle,
    model_name: str,
) -> None:
    errors.install_handlers(application)
    # These two change the routes that the app has now, which are vLLM's.
    limit_json(application)
    end_at_first_error(application)

    statistics = rooms.rollouts.statistics
    monitor_sources = MonitorSources(
        rooms.monitor,
        statistics.rewards,
        rooms.updates.coordinator,
        rooms.store,
        is_stopping=lambda: server.is_stopping(application),
    )
    application.include_router(
        create_router(
            rooms.provenance,
            statistics,
            rooms.store,
            rooms.control,
            rooms.batches,
            rooms.votes,
            rooms.sessions,
            rooms.reward_matcher,
            rooms.updates,
            monitor_sources,
            access.needs_key,
        )
    )
    page.add_routes(application.router)
    share_answers(application)
    dialects.add_routes(application, settings.dialect, rooms.dialect_controls)

    # The last middleware that is added is the outermost.
    application.add_middleware(
        SecurityMiddleware,
        access=access,
        limits=BodyLimits(settings.max_body_bytes, flag="--max-body-bytes"),
        on_refusal=AccessMetrics(model_name).refused,
        lifecycle=lifecycle,
        access_overrides=dialects.access_overrides(settings.dialect),
        find_session_of_key=rooms.sessions.owner_of_key,
    )
    application.add_middleware(SessionPaths)


# --- the command doctor ---------------------------------------------------------


def run_all_checks(settings: Settings, vllm_argv: Sequence[str]) -> Iterator[Finding]:
    args = flags.parse(_add_sampling_flags(settings, vllm_argv))
    yield from check_local(settings, args)
    try:
        yield check_address(args, _make_access(settings, args), settings.allow_unauthenticated)
    except InvalidSetting as error:
        yield fail("keys", str(error))
    yield from check_vllm(args, has_model=bool(args.model_tag) or "--model" in vllm_argv)
