"""All settings: their types, defaults and help texts, and the combinations that are valid."""

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
"""Regular expression for host names without port or patterns of them (``*.example.com``, ``*``), with commas."""

if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(POLICIES)]

Dialect = Literal["areal", "nemo-rl", "prime-rl", "skyrl"]
"""Trainers with routes or fields of their own."""


def _parse_dialects(value: object) -> object:
    """Return the distinct names in ``areal,skyrl`` or in a list."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        parts = [parts]
    # A dict, because it keeps the order.
    names: dict[str, None] = {}
    for part in parts:
        name = str(part).strip()
        if not name:
            continue
        if name not in get_args(Dialect):
            raise ValueError(f"{name!r} is unknown; choose from {', '.join(get_args(Dialect))}")
        names[name] = None
    return tuple(names)


def _split_lines(value: object) -> object:
    """Return the lines of a text or a list that are not empty."""
    lines = value.splitlines() if isinstance(value, str) else value
    # pydantic refuses values of other types.
    if not isinstance(lines, list | tuple):
        return value
    return tuple(line for line in lines if not isinstance(line, str) or line.strip())


def _parse_detection_points(value: Any) -> object:
    """Return the whole numbers in ``128,512`` or in a list, ascending."""
    try:
        parts = value.split(",") if isinstance(value, str) else value
        points = {int(part) for part in parts}
    except (TypeError, ValueError):
        # Refused below.
        points = set()
    if not points or min(points) < 1:
        raise ValueError("must be positive whole numbers, separated by commas")
    return tuple(sorted(points))


def _parse_redundancy(value: object, parse: ValidatorFunctionWrapHandler) -> object:
    # pydantic would report an error for each type of the union.
    try:
        return parse(value)
    except ValidationError as error:
        raise ValueError("must be a number from 1 to 16, or auto") from error


Redundancy = Annotated[Annotated[float, Field(ge=1, le=16)] | Literal["auto"], WrapValidator(_parse_redundancy)]


def _check_group_pattern(text: str) -> str:
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
    """Candidates started for each returned trajectory, 1 to 16. uniform starts this number for every prompt, other
    policies on average. auto: the formula of the DARTS paper's public code, which uses the spread of lengths (1.5 until
    lengths are known). informative starts 2 unless a number is set."""
    max_redundancy: Runtime[float] = Field(2.0, ge=1, le=16)
    """Maximum candidates per returned trajectory for one prompt. uniform ignores it. informative uses 1.5 times its
    redundancy unless this is set."""
    num_longest: Runtime[int] = Field(1, ge=0, le=1024)
    """L: trajectories of a group that are chosen from the tail. The other K = n - L trajectories are the shortest. 0
    returns only the shortest."""
    tail: Runtime[Literal["sampled", "longest"]] = "sampled"
    """How the L trajectories of the tail are chosen. sampled: at random among all candidates that are not among the K
    shortest; all other candidates are stopped at once. longest: the L longest, as in the DARTS paper; every candidate
    then runs until it finishes."""
    deadline_quantile: Runtime[float] = Field(0.9, ge=0.1, le=1)
    """darts_cut, cap: the deadline is the length at which this share of a cohort's groups have as many finished
    candidates as they return. Prompts that need longer answers get up to twice the deadline. At that length
    every candidate is cut, and groups with too few finished candidates are filled with truncated candidates."""
    exploration: Runtime[float] = Field(0.05, ge=0, le=1)
    """Share of cohorts that run past the deadline, to measure what the deadline discards. auto: maximum share of
    batches that test whether more or fewer prompts at once are faster."""
    max_lost_share: Runtime[float] = Field(0.02, ge=0, le=1)
    """Maximum share of correct answers that the deadline may discard, measured by the rewards of cohorts that ran past
    the deadline. If more are lost, or if more than 1 in 200 groups with correct answers would lose all of them, the
    deadline is moved later. 1: the deadline is never moved."""
    select: Runtime[Literal["informative", "max_variance"]] = "informative"
    """informative: how trajectories are selected by their rewards. informative: at random, with probabilities
    proportional to the size of their advantages, and with weights that remove the bias. max_variance: the subset with
    the largest variance of rewards (PODS), which biases the gradient."""
    advantage_std: Runtime[bool] = False
    """informative: divide advantages by the standard deviation of the group's rewards, as in GRPO."""
    most_stale: Runtime[float] = Field(0.5, ge=0, le=1)
    """auto: maximum share of returned tokens that older weights generated, on average over batches with "carry":
    "resume"."""
    skip_floor: Runtime[float | None] = Field(None, gt=0, le=1)
    """informative: probability with which a batch runs a prompt whose rewards will be equal with a probability above
    .8, by its pass rate in earlier steps. Its group then counts 1 / skip_floor (run_probability). Batches that carry
    prompts over skip none. Default: all prompts run."""
    speculate: Runtime[Literal["off", "auto"]] = "off"
    """Speculative decoding, which changes no distribution. auto: drafts from what samples of the same prompt have
    answered, now and in earlier epochs; as many as make a step faster. Excludes vLLM's --speculative-config. Only a
    server that was started with auto can change it; off then drafts nothing, and goes on learning."""
    history_bytes: int = Field(1 << 28, ge=0)
    """Maximum bytes of answers that are kept for the drafts of --speculate auto, in memory and under --state-dir, at
    four bytes a token. Engines get them when they have started again, or when other engines generated them. At the
    limit, the oldest answers are dropped. 0: none are kept."""
    sampling: Literal["vllm", "coupled"] = "vllm"
    """How random numbers are drawn. vllm: from one generator, or one for each seed. coupled: for each stream and
    position, so that a seed gives the same tokens beside other requests, with drafts, resumed, and on another engine.
    Excludes vLLM's --speculative-config."""
    reuse_streams: bool = False
    """Candidate i of a batch's prompt keeps its stream from epoch to epoch, unless the batch has a seed. Its earlier
    answer is then a draft that mostly holds, but its answers depend on each other. Needs --sampling coupled and
    --speculate auto."""
    group_size: Runtime[int | None] = Field(None, ge=2, le=MAX_GROUP_SIZE)
    """Group size of your trainer. If set, a shaped request must have this n, and requests with n = 1 and the same
    prompt are joined into groups of this size."""
    later_turns: Runtime[Literal["alone", "join"]] = "alone"
    """What happens to single requests that continue a trajectory, or seem to. alone: they run at once, unshaped. join:
    they wait for requests with the same prompt and are joined into groups, like requests that open a trajectory."""
    group_wait: float = Field(5.0, ge=0, le=600)
    """Seconds to wait for a further request before single requests form a group that is not full."""
    group_name_wait: float = Field(60.0, ge=0, le=600)
    """Like --group-wait, for groups with a name, and at least as long. Their requests may arrive late, when other
    trajectories of a pool have ended or have left their environments."""
    group_pattern: Annotated[str, AfterValidator(_check_group_pattern)] = ""
    """Regular expression that finds the name of a group in the name of a session. The part in parentheses is the
    group's name, such as (.+)_[0-9]+ for SkyRL. Default: sessions name no groups."""
    cohort_window: float = Field(0.02, ge=0, le=1)
    """Seconds within which arriving groups form a cohort, which shares one budget and one deadline."""
    state_dir: Path | None = None
    """Folder for learned state, which then survives a restart. Default: learned state is kept in memory."""
    kept_bytes: int = Field(1 << 30, ge=0)
    """Maximum memory in bytes for batches with an Idempotency-Key. A running batch counts as the size of its request.
    At the limit, the oldest ended batch of the API key with the most memory is dropped. One API key may use half of the
    limit, and as much again for carried prompts."""
    carried_prompts: int = Field(4096, ge=0, le=1_000_000)
    """Maximum prompts that are carried over from batch to batch, for each API key. At the limit, the oldest prompts are
    dropped."""
    max_staleness: int = Field(4, ge=0, le=1_000_000)
    """Maximum age of carried tokens in weight versions. Older tokens are dropped, and their prompt starts again. 0:
    tokens are used only under the weights that generated them."""

    weights_root: Path | None = None
    """Folder that new weights may be loaded from. Default: weights can only be pushed."""
    weights_staging: Path | None = None
    """Folder for pushed weights, with space for two models. Default: the folder for temporary files."""
    weights_rule: Literal["finish", "keep", "restart"] = "finish"
    """What happens to running groups when new weights arrive. finish: the update waits for running groups, and new
    groups wait for the update. keep: groups pause and continue with the new weights, and their trajectories are marked
    as mixed. restart: groups are stopped and start again with the new weights."""
    weights_timeout: float = Field(300.0, ge=0.001, le=86400)
    """Timeout in seconds for each step of an update. The wait for running groups may take twice as long. After a
    timeout, the old weights stay."""

    dialect: Annotated[tuple[Dialect, ...], BeforeValidator(_parse_dialects)] = ()
    """Trainers whose own routes are served too, as aliases of ours: areal, nemo-rl, prime-rl, skyrl, separated by
    commas, such as areal,skyrl. Default: none."""
    api_key_file: Path | None = None
    """File with API keys, one per line, in addition to vLLM's --api-key. Lines that begin with # are comments. SIGHUP
    reloads the file."""
    admin_api_key: SecretStr | None = Field(None, min_length=1)
    """Key for every route, including routes that change the server. Without an admin key, only callers on this machine
    may change the server. Prefer DARTS_ADMIN_API_KEY: flags are visible to every user of the machine."""
    admin_api_key_file: Path | None = None
    """File with admin API keys, one per line."""
    allow_unauthenticated: bool = False
    """Allow listening on a non-loopback address without an API key."""
    allowed_hosts: str = Field("", pattern=NAMES)
    """Host names that callers without an API key may use for the server: NAME, *.DOMAIN, or * for every name,
    separated by commas. localhost, the machine's own name, the name in --host and IP addresses are always allowed.
    Default: no other name, so that a web page whose name points at this machine cannot use the server."""
    allow_dangerous_routes: bool = False
    """Enable vLLM's /collective_rpc, /weight_checker and profiler routes for admins."""
    max_body_bytes: int = Field(64 * 1024 * 1024, ge=1)
    """Maximum size of a request body in bytes, except for pushed weights and states."""
    max_queued_candidates: int | None = Field(None, ge=1)
    """Maximum candidates that wait for the engine. Requests beyond it get status 429. When the queue is half full,
    redundancy begins to fall. When it is full, no redundancy is left. Default: 64 times as many as run at once, at
    least 65,536."""
    max_candidates_per_key: int | None = Field(None, ge=1)
    """Maximum candidates in flight for one API key, including candidates that shaping adds."""

    detect_at: Annotated[tuple[int, ...], BeforeValidator(_parse_detection_points)] = (512,)
    """arrol: numbers of generated tokens at which candidates are scored, such as 128,512."""
    keep_ratio: Runtime[float] = Field(0.5, ge=0.1, le=1)
    """arrol: share of the scored candidates that is kept at each number of --detect-at, 0.1 to 0.9. 1: candidates are
    scored, and none is pruned."""
    quality: Literal["head", "head+logprob", "logprob", "lowest_logprob"] = "head+logprob"
    """arrol: how candidates are scored. head: by hidden states, with a quality head that is trained on rewards.
    logprob: by the mean log-prob of their tokens. lowest_logprob: by the lowest mean log-prob of 64 tokens in a row.
    head+logprob: by hidden states and log-probs, with a quality head that is trained on rewards."""

    verifier: Annotated[tuple[str, ...], BeforeValidator(_split_lines)] = ()
    """Verifier that gives finished candidates their rewards, as [NAME=][WEIGHT*]SPEC. SPEC: FILE.py:FUNCTION (a reward
    function of veRL or TRL), boxed or regex:PATTERN (compares the answer with metadata.answer), math-verify, or
    openrlhf+URL, nemo-gym+URL or slime+URL. Repeat the flag for several verifiers: the reward is the sum of their
    rewards, each times its weight. A variable has one verifier per line. Default: rewards are only reported."""
    verifier_default: float | None = Field(None, allow_inf_nan=False)
    """Reward in place of a verifier's reward, if the verifier fails, takes too long or returns none. Default: then the
    candidate has no reward."""
    verifier_timeout: float = Field(30.0, ge=0.01, le=3600)
    """Seconds that a verifier may take for a candidate. Then its process is killed, or its request ended. A candidate
    that waits 20 times as long for its verdict, and at least a minute, has no reward."""
    verifier_processes: int | None = Field(None, ge=1, le=1024)
    """Maximum processes of each verifier that is not a URL. They are started when they are needed. Default: half as
    many as there are cores."""
    verifier_requests: int = Field(64, ge=1, le=4096)
    """Maximum requests at the same time to each verifier that is a URL."""
    verifier_memory: int = Field(4 << 30, ge=0)
    """Maximum memory in bytes of each process of a verifier. 0: no limit."""

    session_idle: float = Field(1800.0, gt=0, le=86400)
    """Seconds without a request after which a session of an agent ends as silent. Its tools may not take longer."""
    session_webhook: str | None = Field(None, pattern="^https?://")
    """URL that gets the events of sessions by POST, as JSON with group_id, session, type and reason. Default: harnesses
    wait for events by GET."""
    grace_seconds: float | None = Field(None, ge=0, le=86400)
    """Seconds that running requests may take after a stop signal. Then batches get what their groups have generated,
    and other requests get status 503. Default: vLLM's --shutdown-timeout, or 30."""
    engine_watchdog: float = Field(300.0, ge=0, le=86400)
    """Seconds that an engine with requests may send nothing. Then the server exits with an error or, with --replicas,
    restarts the engine. 0: no limit."""
    replicas: int | None = Field(None, ge=1, le=1024)
    """Number of engines behind this server. Ray places, watches and restarts them, each with the GPUs of
    --tensor-parallel-size and the like. Default: one engine, without Ray."""
    ray_address: str | None = None
    """Ray cluster for --replicas: auto, or HOST:PORT of its head. Default: a cluster on this machine, which ends with
    the server."""
    gpus_per_replica: float | None = Field(None, ge=0)
    """GPUs that Ray reserves for an engine. Default: as many as the model is divided over."""
    log_format: Literal["console", "json"] = "console"
    """Format of all log lines, including vLLM's."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = None
    """Log level, also of vLLM. DEBUG logs each group, INFO each cohort. Default: VLLM_LOGGING_LEVEL, or INFO."""

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.policy == "informative" and not self.verifier:
            raise ValueError(
                "policy 'informative' needs rewards while groups run, and this server has no verifier; start it with "
                "--verifier"
            )
        uses_max_redundancy = self.policy not in ("off", "uniform", "arrol", "informative")
        if uses_max_redundancy and self.redundancy != "auto" and self.redundancy > self.max_redundancy:
            raise ValueError(
                f"redundancy must be at most max_redundancy = {self.max_redundancy}, got {self.redundancy}"
            )
        # In the ARRoL paper, a candidate survives with a probability from 0.1 to 0.9.
        if 0.9 < self.keep_ratio < 1:
            raise ValueError(
                f"keep_ratio must be from 0.1 to 0.9, or 1 to score candidates and prune none, got {self.keep_ratio}"
            )
        if self.reuse_streams and (self.sampling != "coupled" or self.speculate != "auto"):
            raise ValueError(
                "reuse_streams needs --sampling coupled and --speculate auto: other sampling has no streams, and only "
                "drafts gain by them"
            )
        for name in ("weights_root", "weights_staging"):
            folder: Path | None = getattr(self, name)
            if folder is not None and not folder.is_dir():
                raise ValueError(f"{name} must be an existing folder, got {folder}")
        if self.replicas is None:
            for name in ("ray_address", "gpus_per_replica"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is only used with replicas; set --replicas, or omit it")
        if self.group_size is not None and self.num_longest >= self.group_size:
            raise ValueError(f"num_longest must be smaller than group_size = {self.group_size}, got {self.num_longest}")
        return self


# The docstrings are the help texts, without their line breaks.
for _field in Settings.model_fields.values():
    _field.description = " ".join(str(_field.description).split())
Settings.model_rebuild(force=True)
