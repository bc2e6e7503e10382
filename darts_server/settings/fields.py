"""Every setting: its type, default and help text, and which combinations are valid."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from darts_server.types import POLICIES

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
    redundancy: Runtime[float] = Field(1.5, ge=1, le=16)
    """Candidates started per returned trajectory; on average, except for uniform."""
    max_redundancy: Runtime[float] = Field(2.0, ge=1, le=16)
    """Maximum candidates per trajectory for one prompt. Not used by uniform."""
    budget: Runtime[Literal["fixed", "cv_log"]] = "fixed"
    """What sets the mean number of candidates. fixed: --redundancy. cv_log: the formula of the DARTS paper's public
    code, by the spread of lengths."""
    num_longest: Runtime[int] = Field(1, ge=0, le=1024)
    """L: trajectories of a group that come from the tail. 0 keeps only the shortest."""
    num_shortest: Runtime[int | None] = Field(None, ge=1, le=1024)
    """K: shortest trajectories that are kept. Default: n - L. If set, n must be K + L."""
    tail: Runtime[Literal["sampled", "longest"]] = "sampled"
    """How the L trajectories of the tail are chosen. sampled: at random among all candidates that are not among the K
    shortest; the rest are stopped at once. longest: the longest ones (the DARTS paper's rule; every candidate then runs
    until it finishes)."""
    deadline_quantile: Runtime[float] = Field(0.9, ge=0.1, le=1)
    """darts_cut, cap: the deadline is the length at which this share of a cohort's groups has as many finished
    candidates as it returns. Prompts that need longer get longer."""
    deadline_floor: Runtime[int] = Field(1, ge=1)
    """Minimum deadline in tokens."""
    deadline_ceiling: Runtime[int | None] = Field(None, ge=1)
    """Maximum deadline in tokens, except for prompts that need longer."""
    deadline_bound: Runtime[float] = Field(2.0, ge=1, le=1000)
    """How many times as long as the deadline any candidate may become; there it is cut. Groups that still have too few
    finished candidates are returned with truncated ones."""
    exploration: Runtime[float] = Field(0.05, ge=0, le=1)
    """Share of cohorts that run past the deadline, to measure what it discards. auto: maximum share of batches that
    test whether more or fewer prompts at once are faster by now."""
    max_lost_share: Runtime[float] = Field(0.02, ge=0, le=1)
    """Maximum share of correct answers that the deadline may discard, by the rewards reported for cohorts that ran past
    it. Above it, the deadline is moved later."""
    max_lost_groups: Runtime[float] = Field(0.005, ge=0, le=1)
    """Maximum share of the groups with correct answers from which the deadline may take all of them. It protects
    prompts that need much longer answers than others."""
    most_stale: Runtime[float] = Field(0.5, ge=0, le=1)
    """auto: maximum share of returned tokens that older weights have generated, on average over batches with "carry":
    "resume"."""
    group_size: Runtime[int | None] = Field(None, ge=2, le=1024)
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
    max_group_size: Runtime[int] = Field(1024, ge=1, le=16384)
    """Maximum n of a request."""
    cohort_window: float = Field(0.02, ge=0, le=1)
    """Seconds within which groups form a cohort: they share one budget and one deadline."""
    state_dir: Path | None = None
    """Folder for learned state, so that it survives a restart. Default: it is kept in memory."""
    poll_interval: float = Field(0.02, ge=0.001, le=1)
    """Seconds between two polls of running candidates' token counts."""
    resume_seconds: float = Field(60.0, ge=1, le=86400)
    """Seconds that a batch with an Idempotency-Key keeps running without a connected caller, so that the caller can
    reconnect; then it is cancelled."""
    kept_seconds: float = Field(600.0, ge=0, le=604800)
    """Seconds that such a batch is kept after it has ended, to be fetched again."""
    kept_batches: int = Field(64, ge=0, le=65536)
    """Maximum ended batches kept, with all their tokens; the oldest are dropped first."""
    kept_bytes: int = Field(1 << 30, ge=0)
    """Maximum memory for batches with an Idempotency-Key, running ones counted by the size of their requests. The
    oldest ended ones are dropped first. One API key has half of it, and as much for prompts carried over."""
    carried_prompts: int = Field(4096, ge=0, le=1_000_000)
    """Maximum prompts carried over from batch to batch, for each API key; the oldest are dropped first."""
    carried_tokens: int = Field(1 << 22, ge=0)
    """Maximum tokens that are carried over with them, for each API key. Beyond it the oldest prompts start again."""
    max_staleness: int = Field(4, ge=0, le=1_000_000)
    """Weight versions after which tokens that were carried over are dropped, and their prompt starts again. 0: only
    under the weights that generated them."""

    weights_root: Path | None = None
    """Folder from which new weights may be loaded. Default: weights can only be pushed."""
    weights_staging: Path | None = None
    """Folder for pushed weights, with space for two models. Default: the folder for temporary files."""
    weights_rule: Literal["finish", "keep", "resume", "restart"] = "finish"
    """What happens to running groups when new weights arrive. finish: the update waits for them, and new groups wait
    for the update. keep: they pause and continue with the new weights, marked as mixed. restart: they are stopped and
    restarted with the new weights. resume: another name of keep."""
    weights_wait: float = Field(600.0, ge=0.001, le=86400)
    """finish: timeout of that wait in seconds; then the old weights stay."""
    weights_timeout: float = Field(300.0, ge=0.001, le=86400)
    """Timeout in seconds of each other step of an update."""

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
    """Maximum candidates that wait for the engine; requests with more get status 429. Default: 64 times as many as run
    at once, at least 65,536."""
    max_candidates_per_key: int | None = Field(None, ge=1)
    """Maximum candidates in flight for one API key, with those that shaping adds."""
    brownout: float = Field(0.5, ge=0, le=1)
    """Share of --max-queued-candidates from which redundancy is reduced, down to none when the queue is full. 1
    disables it."""

    detect_at: Annotated[tuple[int, ...], BeforeValidator(_detection_points)] = (512,)
    """arrol: numbers of generated tokens at which candidates are scored, such as 128,512."""
    keep_ratio: Runtime[float] = Field(0.5, ge=0.05, le=1)
    """arrol: share of the scored candidates that is kept at each of these points."""
    balance_strength: Runtime[float] = Field(0.5, ge=0, le=100)
    """arrol: how strongly survival depends on the score. 0 prunes at random."""
    min_survival: Runtime[float] = Field(0.1, ge=0.01, le=1)
    """arrol: minimum probability of being kept. A survivor weighs at most 1 / min_survival."""
    max_survival: Runtime[float] = Field(0.9, ge=0.01, le=1)
    """arrol: maximum probability of being kept."""
    refill: Runtime[bool] = False
    """arrol: start a new candidate for each pruned one, up to the group's maximum."""
    quality: Literal["head", "head+logprob", "logprob", "lowest_logprob"] = "head+logprob"
    """arrol: what candidates are scored by. head: hidden states, with a head trained on rewards. logprob: the mean
    log-prob of the tokens. lowest_logprob: the lowest mean log-prob of 64 tokens in a row. head+logprob: hidden states
    and log-probs, trained on rewards."""
    calibration: Literal["monotone", "paper"] = "monotone"
    """arrol: how scores are mapped to probabilities of being correct. paper: by counts in bins, as in the ARRoL paper.
    monotone: non-decreasing in the score, and corrected for the labels that pruning hides."""
    quality_fallback: Literal["refuse", "logprob"] = "refuse"
    """What to do if the engine cannot provide hidden states. refuse: nothing is pruned, and requests for a pruning
    policy are refused. logprob: score by log-probs."""
    quality_device: str = Field("cpu", min_length=1)
    """Torch device on which the head is trained."""
    cold_steps: int = Field(20, ge=0, le=100_000)
    """arrol: steps before the first pruning. A step ends with new weights, or after 256 groups."""
    cold_labels: int = Field(256, ge=2, le=4096)
    """arrol: rewarded candidates needed before the first pruning."""
    reward_threshold: float | None = None
    """arrol: a reward of at least this counts as correct. Default: the reported `correct`."""
    soft_rewards: bool = False
    """arrol: learn from the reward itself, clipped to 0 to 1."""

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
    cpus_per_replica: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for an engine."""
    log_format: Literal["console", "json"] = "console"
    """Format of all log lines, including vLLM's."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = None
    """Log level, also of vLLM. DEBUG logs each group, INFO each cohort. Default: VLLM_LOGGING_LEVEL, or INFO."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        shortest, longest, size = self.num_shortest, self.num_longest, self.group_size
        if self.policy not in ("off", "uniform", "arrol") and self.redundancy > self.max_redundancy:
            raise ValueError(
                f"redundancy must be at most max_redundancy = {self.max_redundancy}, got {self.redundancy}"
            )
        if self.deadline_ceiling is not None and self.deadline_ceiling < self.deadline_floor:
            raise ValueError(
                f"deadline_ceiling must be at least deadline_floor = {self.deadline_floor}, got {self.deadline_ceiling}"
            )
        if size is not None and shortest is not None and shortest + longest != size:
            raise ValueError(
                f"num_shortest + num_longest must equal group_size, got {shortest} + {longest} != {size}; "
                f"change one of the three or omit num_shortest"
            )
        if not self.min_survival <= self.keep_ratio <= self.max_survival:
            raise ValueError(
                f"keep_ratio must be from min_survival = {self.min_survival} to max_survival = {self.max_survival}, "
                f"got {self.keep_ratio}"
            )
        if self.soft_rewards and self.reward_threshold is not None:
            raise ValueError("soft_rewards and reward_threshold exclude each other; omit one")
        for folder in ("weights_root", "weights_staging"):
            if (path := getattr(self, folder)) is not None and not path.is_dir():
                raise ValueError(f"{folder} must be an existing folder, got {path}")
        if size is not None and longest >= size:
            raise ValueError(f"num_longest must be smaller than group_size = {size}, got {longest}")
        if size is not None and size > self.max_group_size:
            raise ValueError(f"group_size must be at most max_group_size = {self.max_group_size}, got {size}")
        return self


for _field in Settings.model_fields.values():  # the docstrings are the help texts, without their line breaks
    _field.description = " ".join(str(_field.description).split())
Settings.model_rebuild(force=True)
