"""Every setting: its type, default and help text, and which combinations are valid."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from darts_server.types import MAX_GROUP_SIZE, POLICIES

ENV_PREFIX = "DARTS_"
RUNTIME = object()
T = TypeVar("T")
Runtime = Annotated[T, RUNTIME]
"""Marks a setting that can change while the server runs."""

NAMES = r"^$|^N(,N)*$".replace("N", r"(\*|(\*\.)?[^\s,/@:*]+)")
"""A comma-separated list of host names without port, or patterns of them: ``*.example.com``, ``*``."""

if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(POLICIES)]

Dialect = Literal["areal", "nemo-rl", "prime-rl", "skyrl"]
"""Trainers with routes or fields of their own."""


def _names(value: object) -> object:
    """Parse ``areal,skyrl``, or a list."""
    names = value.split(",") if isinstance(value, str) else value
    stripped = [str(name).strip() for name in names] if isinstance(names, list | tuple) else [str(names)]
    if unknown := [name for name in stripped if name and name not in get_args(Dialect)]:
        raise ValueError(f"{unknown[0]!r} is unknown; known ones are {', '.join(get_args(Dialect))}")
    return tuple(dict.fromkeys(filter(None, stripped)))


def _detection_points(value: Any) -> object:
    """Parse ascending whole numbers from ``128,512`` or from a list."""
    try:
        points = [int(part) for part in (value.split(",") if isinstance(value, str) else value)]
    except (TypeError, ValueError):
        points = []
    if not points or min(points) < 1:
        raise ValueError("must be positive whole numbers, separated by commas")
    return tuple(sorted(set(points)))


def _redundancy(value: object, parse: ValidatorFunctionWrapHandler) -> object:
    """Report one error for a value that is neither a number in the range nor ``auto``."""
    try:
        return parse(value)
    except ValidationError as error:
        raise ValueError("must be a number from 1 to 16, or auto") from error


Redundancy = Annotated[Annotated[float, Field(ge=1, le=16)] | Literal["auto"], WrapValidator(_redundancy)]


def _group_pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from error
    if text and groups != 1:
        raise ValueError(f"must have one pair of parentheses, for the group's name, got {groups}")
    return text


class Settings(BaseModel):
    """Settings of ``darts-server serve``, in addition to vLLM's flags."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    policy: Runtime[Policy] = Field(
        "auto",
        description=f"How groups are shaped. {' '.join(f'{name}: {about}.' for name, about in POLICIES.items())}",
    )
    redundancy: Runtime[Redundancy] = 1.5
    """Candidates started per returned trajectory, 1 to 16; on average, except for uniform. auto: the formula of the
    DARTS paper's public code, by the spread of lengths; 1.5 until that is known."""
    max_redundancy: Runtime[float] = Field(2.0, ge=1, le=16)
    """Maximum candidates per trajectory for one prompt. Not used by uniform."""
    num_longest: Runtime[int] = Field(1, ge=0, le=1024)
    """L: trajectories of a group that come from the tail. The others are the K = n - L shortest. 0 keeps only the
    shortest."""
    tail: Runtime[Literal["sampled", "longest"]] = "sampled"
    """How the L trajectories of the tail are chosen. sampled: at random among all candidates that are not among the K
    shortest; the rest are stopped at once. longest: the longest ones (the DARTS paper's rule; every candidate then runs
    until it finishes)."""
    deadline_quantile: Runtime[float] = Field(0.9, ge=0.1, le=1)
    """darts_cut, cap: the deadline is the length at which this share of a cohort's groups has as many finished
    candidates as it returns. Prompts that need longer get longer, up to twice the deadline; there every candidate is
    cut, and groups with too few finished candidates are returned with truncated ones."""
    exploration: Runtime[float] = Field(0.05, ge=0, le=1)
    """Share of cohorts that run past the deadline, to measure what it discards. auto: maximum share of batches that
    test whether more or fewer prompts at once are faster by now."""
    max_lost_share: Runtime[float] = Field(0.02, ge=0, le=1)
    """Maximum share of correct answers that the deadline may discard, by the rewards reported for cohorts that ran past
    it. Above it, or if more than one in 200 of the groups with correct answers would lose all of them, the deadline is
    moved later. 1: the deadline is never moved."""
    most_stale: Runtime[float] = Field(0.5, ge=0, le=1)
    """auto: maximum share of returned tokens that older weights have generated, on average over batches with "carry":
    "resume"."""
    group_size: Runtime[int | None] = Field(None, ge=2, le=MAX_GROUP_SIZE)
    """The group size that your trainer uses. If set, a shaped request must have this n, and requests with n = 1 and the
    same prompt are joined into groups of this size."""
    later_turns: Runtime[Literal["alone", "join"]] = "alone"
    """Single requests that continue a trajectory, or look so. alone: they run at once, unshaped. join: they are joined
    into groups like those that open one, and wait for others with the same prompt."""
    group_wait: float = Field(5.0, ge=0, le=600)
    """Seconds without another request after which single requests form a group even if it is not full."""
    group_name_wait: float = Field(60.0, ge=0, le=600)
    """The same for a group that has a name, at least --group-wait. Requests of it may come late: when others of a pool
    of trajectories have ended, or have left their environments."""
    group_pattern: Annotated[str, AfterValidator(_group_pattern)] = ""
    """Regular expression for sessions whose name contains that of their group: what its parentheses match, so
    (.+)_[0-9]+ for SkyRL's. Default: sessions name no groups."""
    cohort_window: float = Field(0.02, ge=0, le=1)
    """Seconds within which groups form a cohort: they share one budget and one deadline."""
    state_dir: Path | None = None
    """Folder for learned state, so that it survives a restart. Default: it is kept in memory."""
    kept_bytes: int = Field(1 << 30, ge=0)
    """Maximum memory for batches with an Idempotency-Key, running ones counted by the size of their requests. The
    oldest ended one of the key that has most is dropped first. One API key has half of it, and as much for prompts
    carried over."""
    carried_prompts: int = Field(4096, ge=0, le=1_000_000)
    """Maximum prompts carried over from batch to batch, for each API key; the oldest are dropped first."""
    max_staleness: int = Field(4, ge=0, le=1_000_000)
    """Weight versions after which tokens that were carried over are dropped, and their prompt starts again. 0: only
    under the weights that generated them."""

    weights_root: Path | None = None
    """Folder from which new weights may be loaded. Default: weights can only be pushed."""
    weights_staging: Path | None = None
    """Folder for pushed weights, with space for two models. Default: the folder for temporary files."""
    weights_rule: Literal["finish", "keep", "restart"] = "finish"
    """What happens to running groups when new weights arrive. finish: the update waits for them, and new groups wait
    for the update. keep: they pause and continue with the new weights, marked as mixed. restart: they are stopped and
    restarted with the new weights."""
    weights_timeout: float = Field(300.0, ge=0.001, le=86400)
    """Timeout in seconds of each step of an update. The wait for running groups may take twice as long; then the old
    weights stay."""

    dialect: Annotated[tuple[Dialect, ...], BeforeValidator(_names)] = ()
    """Trainers whose own routes are served too, as aliases of ours: areal, nemo-rl, prime-rl, skyrl, separated by
    commas, such as areal,skyrl. Default: none."""
    api_key_file: Path | None = None
    """File with API keys, one per line, in addition to vLLM's --api-key; lines that begin with # are comments. SIGHUP
    reloads it."""
    admin_api_key: SecretStr | None = Field(None, min_length=1)
    """Gives access to every route, including those that change the server. Without an admin key only callers on this
    machine have access to those. Prefer DARTS_ADMIN_API_KEY: flags are visible to every user of the machine."""
    admin_api_key_file: Path | None = None
    """File with admin API keys, one per line."""
    allow_unauthenticated: bool = False
    """Allow listening on a non-loopback address without an API key."""
    allowed_hosts: str = Field("", pattern=NAMES)
    """Names by which callers without an API key may address the server, in addition to localhost, the machine's own
    name, that of --host, and IP addresses: NAME, *.DOMAIN, or * for every name, separated by commas. Default: none, so
    that a web page whose name points at this machine cannot use the server."""
    allow_dangerous_routes: bool = False
    """Enable vLLM's /collective_rpc, /weight_checker and profiler routes for admins."""
    max_body_bytes: int = Field(64 * 1024 * 1024, ge=1)
    """Maximum size of a request body, except for pushed weights and states."""
    max_queued_candidates: int | None = Field(None, ge=1)
    """Maximum candidates that wait for the engine; requests with more get status 429. From half of it, redundancy is
    reduced, down to none when the queue is full. Default: 64 times as many as run at once, at least 65,536."""
    max_candidates_per_key: int | None = Field(None, ge=1)
    """Maximum candidates in flight for one API key, with those that shaping adds."""

    detect_at: Annotated[tuple[int, ...], BeforeValidator(_detection_points)] = (512,)
    """arrol: numbers of generated tokens at which candidates are scored, such as 128,512."""
    keep_ratio: Runtime[float] = Field(0.5, ge=0.1, le=1)
    """arrol: share of the scored candidates that is kept at each of these points, 0.1 to 0.9, or 1: candidates are
    scored, and none is pruned."""
    quality: Literal["head", "head+logprob", "logprob", "lowest_logprob"] = "head+logprob"
    """arrol: what candidates are scored by. head: hidden states, with a head trained on rewards. logprob: the mean
    log-prob of the tokens. lowest_logprob: the lowest mean log-prob of 64 tokens in a row. head+logprob: hidden states
    and log-probs, trained on rewards."""

    grace_seconds: float | None = Field(None, ge=0, le=86400)
    """Seconds that running requests may take after a stop signal; then batches get what their groups have generated,
    and other requests status 503. Default: vLLM's --shutdown-timeout, or 30."""
    engine_watchdog: float = Field(300.0, ge=0, le=86400)
    """Seconds without output from an engine that has requests, after which the server exits with an error. 0 disables
    it."""
    replicas: int | None = Field(None, ge=1, le=1024)
    """Engines behind this server, each with the GPUs of --tensor-parallel-size and the like, placed, watched and
    started again by Ray. Default: one engine, without Ray."""
    ray_address: str | None = None
    """Ray cluster for --replicas: auto, or HOST:PORT of its head. Default: one is started on this machine, and ends
    with the server."""
    gpus_per_replica: float | None = Field(None, ge=0)
    """GPUs that Ray reserves for an engine. Default: as many as the model is divided over."""
    log_format: Literal["console", "json"] = "console"
    """Format of all log lines, including vLLM's."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = None
    """Log level, also of vLLM. DEBUG logs each group, INFO each cohort. Default: VLLM_LOGGING_LEVEL, or INFO."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        size = self.group_size
        is_limited = self.policy not in ("off", "uniform", "arrol")
        if is_limited and self.redundancy != "auto" and self.redundancy > self.max_redundancy:
            raise ValueError(
                f"redundancy must be at most max_redundancy = {self.max_redundancy}, got {self.redundancy}"
            )
        # A candidate survives with a probability from 0.1 to 0.9, as in the ARRoL paper.
        if 0.9 < self.keep_ratio < 1:
            raise ValueError(
                f"keep_ratio must be from 0.1 to 0.9, or 1 to score candidates and prune none, got {self.keep_ratio}"
            )
        for folder in ("weights_root", "weights_staging"):
            if (path := getattr(self, folder)) is not None and not path.is_dir():
                raise ValueError(f"{folder} must be an existing folder, got {path}")
        if size is not None and self.num_longest >= size:
            raise ValueError(f"num_longest must be smaller than group_size = {size}, got {self.num_longest}")
        return self


for _field in Settings.model_fields.values():  # the docstrings are the help texts, without their line breaks
    _field.description = " ".join(str(_field.description).split())
Settings.model_rebuild(force=True)
