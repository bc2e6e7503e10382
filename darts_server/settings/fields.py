"""Every setting: its kind, its default, what it means, and what fits together."""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from darts_server.settings.kinds import HOSTS, DetectAt, LogFormat, LogLevel, Policy

ENV_PREFIX = "DARTS_"
LIVE = object()
T = TypeVar("T")
Live = Annotated[T, LIVE]
"""Marks a setting that can change while the server runs."""


class Settings(BaseSettings):
    """What ``darts-server serve`` adds to vLLM's flags."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", env_ignore_empty=True)

    policy: Live[Policy] = Field(
        "uniform",
        description="How groups are made. uniform: the same number of candidates for every prompt. darts: more for "
        "prompts whose lengths spread more. darts_deadline: the longest of those in time. darts_cut: a tail drawn by "
        "lot, cut at the deadline. first_finish: what the DARTS paper's public code does, as a baseline. arrol: "
        "candidates are scored while they run, and some pruned at random by their chance to end correct. darts+arrol: "
        "both. off: unshaped. shadow:NAME: unshaped, but what NAME would have done is recorded.",
    )
    redundancy: Live[float] = Field(
        1.5, ge=1, le=16, description="Candidates started per trajectory returned; for all but uniform, on the average."
    )
    max_redundancy: Live[float] = Field(
        2.0, ge=1, le=16, description="All but uniform: candidates per trajectory that one prompt may get at most."
    )
    budget: Live[Literal["fixed", "cv_log", "utility"]] = Field(
        "fixed",
        description="What decides the mean number of candidates: --redundancy, the closed form of the DARTS paper's "
        "public code, or the best trade of shorter groups against rollout time by what was learned of both.",
    )
    budget_aversion: Live[float] = Field(
        1.0, ge=0, le=1000, description="utility: per cent that groups must get shorter for one per cent more time."
    )
    num_longest: Live[int] = Field(
        1, ge=0, le=1024, description="L: trajectories of a group that come from the tail. 0 keeps the shortest only."
    )
    num_shortest: Live[int | None] = Field(
        None, ge=1, le=1024, description="K: shortest trajectories kept. Left out, it is n - L; set, n must be K + L."
    )
    tail: Live[Literal["sampled", "longest"]] = Field(
        "sampled",
        description="Who gets the L places: drawn by lot from all that are not among the shortest, the others being "
        "stopped at once, or the longest (the DARTS paper's rule; everything then runs to its end).",
    )
    deadline_quantile: Live[float] = Field(
        0.9,
        ge=0.1,
        le=1,
        description="darts_deadline, darts_cut: the tail is waited for until this share of a batch's groups have as "
        "many finished candidates as they return; a prompt that needs longer itself gets longer.",
    )
    deadline_floor: Live[int] = Field(1, ge=1, description="The deadline is at least that many tokens.")
    deadline_ceiling: Live[int | None] = Field(
        None, ge=1, description="It is at most that many tokens, but for prompts that need longer themselves."
    )
    exploration: Live[float] = Field(
        0.05, ge=0, le=1, description="Share of batches that run past the deadline, to see what it takes away."
    )
    most_lost: Live[float] = Field(
        0.02,
        ge=0,
        le=1,
        description="Share of right answers that the deadline may take away, by the rewards reported for batches that "
        "ran past it; above it, the deadline is held back.",
    )
    group_size: Live[int | None] = Field(
        None,
        ge=2,
        le=1024,
        description="The group size your trainer asks for. Set, a shaped request must have that n, and requests with "
        "n = 1 and the same prompt are put together to groups of that size.",
    )
    group_wait: float = Field(
        5.0,
        ge=0,
        le=600,
        description="Seconds without a further request after which a group of single requests is made of those there.",
    )
    max_group_size: Live[int] = Field(1024, ge=1, le=16384, description="Largest n that a request may ask for.")
    batch_window: float = Field(
        0.02, ge=0, le=1, description="Seconds within which groups that come together share one budget and deadline."
    )
    state_dir: Path | None = Field(
        None, description="Folder in which what was learned outlives a restart. Left out, it is kept in memory."
    )
    peek_interval: float = Field(
        0.02, ge=0.001, le=1, description="Seconds between two looks at how far running candidates are."
    )
    resume_seconds: float = Field(
        60.0,
        ge=1,
        le=86400,
        description="Seconds that a batch with an Idempotency-Key goes on when nobody listens, for its caller to come "
        "back; then it is cancelled.",
    )
    kept_seconds: float = Field(
        600.0, ge=0, le=604800, description="Seconds that such a batch is kept after its end, to be asked for again."
    )
    kept_batches: int = Field(
        64, ge=0, le=65536, description="Most ended batches that are kept, with all their tokens; the oldest go first."
    )

    weights_root: Path | None = Field(
        None, description="Folder that new weights may be read from. Left out, they can only be pushed."
    )
    weights_staging: Path | None = Field(
        None,
        description="Folder for pushed weights, with room for two models. Left out, the one for temporary files.",
    )
    weights_hosts: str = Field(
        "",
        pattern=HOSTS,
        description="Hosts that new weights may be pulled from over HTTP: HOST or HOST:PORT, with commas between. "
        "Left out, from none.",
    )
    weights_rule: Literal["finish", "keep", "restart"] = Field(
        "finish",
        description="What becomes of running groups when new weights come. finish: they are waited for, and no others "
        "begin meanwhile. keep: they stand still and go on with the new weights, marked as mixed. restart: they are "
        "stopped, and started anew with the new weights.",
    )
    weights_wait: float = Field(
        600.0, ge=0.001, le=86400, description="Seconds that finish waits; then the old weights stay."
    )
    weights_timeout: float = Field(
        300.0, ge=0.001, le=86400, description="Seconds that any other step of an update may take."
    )

    api_key_file: Path | None = Field(
        None, description="File with API keys, one a line, beside vLLM's --api-key. SIGHUP has it read again."
    )
    admin_api_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="Opens every route, also those that change the server. Without such a key these are for callers of "
        "this machine. Better given as DARTS_ADMIN_API_KEY: every user of a machine can read flags.",
    )
    admin_api_key_file: Path | None = Field(None, description="File with such keys, as --api-key-file.")
    allow_unauthenticated: bool = Field(
        False, description="Listen on an address of other machines' without an API key, which is refused otherwise."
    )
    allow_dangerous_routes: bool = Field(
        False, description="Open vLLM's /collective_rpc and its profiler to those who may change the server."
    )
    max_body_bytes: int = Field(
        256 * 1024 * 1024, ge=1, description="Largest body of a request, but for pushed weights and states."
    )
    max_queued_candidates: int | None = Field(
        None,
        ge=1,
        description="Candidates that wait for the engine when further requests get status 429. Left out, 64 times as "
        "many as it runs at once, and 16,384 at least.",
    )
    max_candidates_per_key: int | None = Field(
        None, ge=1, description="Candidates that requests with one API key may have under way."
    )
    detect_at: DetectAt = Field(
        (512,),
        description="arrol: generated tokens at which candidates are scored by quality; several as 128,512.",
    )
    keep_ratio: Live[float] = Field(
        0.5, ge=0.05, le=1, description="arrol: share of the scored candidates that is kept, at each such point."
    )
    target_positive_ratio: Live[float] = Field(
        0.5, ge=0, le=1, description="arrol: share of right ones that groups are drawn towards. 0.5 teaches most."
    )
    balance_strength: Live[float] = Field(
        0.5, ge=0, le=100, description="arrol: how strongly survival depends on quality; 0 prunes at random."
    )
    min_survival: Live[float] = Field(
        0.1, ge=0.01, le=1, description="arrol: least probability to be kept. Labels of survivors count up to 1 / it."
    )
    max_survival: Live[float] = Field(0.9, ge=0.01, le=1, description="arrol: largest probability to be kept.")
    survival: Live[Literal["paper", "aimed"]] = Field(
        "paper",
        description="arrol: who is pruned more. paper: the likely right, which helps where most are right. aimed: "
        "those that are too many for --target-positive-ratio.",
    )
    refill: Live[bool] = Field(False, description="arrol: start a new candidate for each pruned one, up to M_up.")
    quality: Literal["head", "head+logprob", "logprob", "lowest_logprob"] = Field(
        "head+logprob",
        description="arrol: what candidates are scored by. head: hidden states, as learned from rewards. logprob: how "
        "sure the model was of its tokens. lowest_logprob: of the 64 in a row that it was least sure of. head+logprob: "
        "learned from both.",
    )
    calibration: Literal["monotone", "paper"] = Field(
        "monotone",
        description="arrol: how scores become chances to end correct. paper: counted in bins, as the ARRoL paper does. "
        "monotone: made never to fall as scores rise, and corrected for labels that pruning hides.",
    )
    quality_fallback: Literal["refuse", "logprob"] = Field(
        "refuse",
        description="Where the engine cannot tell hidden states. refuse: nothing is pruned, and requests that ask for "
        "it are refused. logprob: scored by log-probs.",
    )
    quality_device: str = Field("cpu", min_length=1, description="Where the head is trained, in torch's words.")
    cold_steps: int = Field(
        20, ge=0, le=100_000, description="arrol: steps that only learn. A step ends with new weights, or 256 groups."
    )
    cold_labels: int = Field(256, ge=2, le=4096, description="arrol: rewarded candidates before the first is pruned.")
    reward_threshold: float | None = Field(
        None, description="arrol: rewards from it on count as right. Left out, what is reported as correct does."
    )
    soft_rewards: bool = Field(False, description="arrol: learn from the reward itself, held to 0 to 1.")

    grace_seconds: float | None = Field(
        None,
        ge=0,
        le=86400,
        description="Seconds that what runs may take when the server is told to stop; then it is answered with status "
        "503. Left out, vLLM's --shutdown-timeout, or 30.",
    )
    engine_watchdog: float = Field(
        300.0,
        ge=0,
        le=86400,
        description="Seconds that an engine with requests may say nothing; then the server ends with an error. 0: any "
        "time.",
    )
    log_format: LogFormat = Field("console", description="How the log looks, vLLM's lines and ours.")
    log_level: LogLevel | None = Field(
        None,
        description="What is logged, by vLLM and here. DEBUG has a line for each group, INFO one for each batch. Left "
        "out, VLLM_LOGGING_LEVEL, or INFO.",
    )

    brownout: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of --max-queued-candidates that waits when redundancy begins to fall; where all of it "
        "waits, none is left. 1 switches that off.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        shortest, longest, size = self.num_shortest, self.num_longest, self.group_size
        if self.policy not in ("off", "uniform", "shadow:uniform", "arrol") and self.redundancy > self.max_redundancy:
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
                f"change one of the three or leave num_shortest out"
            )
        if not self.min_survival <= self.keep_ratio <= self.max_survival:
            raise ValueError(
                f"keep_ratio must be from min_survival = {self.min_survival} to max_survival = {self.max_survival}, "
                f"got {self.keep_ratio}"
            )
        if self.soft_rewards and self.reward_threshold is not None:
            raise ValueError("soft_rewards and reward_threshold exclude each other; leave one out")
        for folder in ("weights_root", "weights_staging"):
            if (path := getattr(self, folder)) is not None and not path.is_dir():
                raise ValueError(f"{folder} must be a folder that is there, got {path}")
        if size is not None and longest >= size:
            raise ValueError(f"num_longest must be smaller than group_size = {size}, got {longest}")
        if size is not None and size > self.max_group_size:
            raise ValueError(f"group_size must be at most max_group_size = {self.max_group_size}, got {size}")
        return self
