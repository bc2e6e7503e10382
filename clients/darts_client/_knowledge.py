"""What the server tells of groups, prompts and weights afterwards."""

from collections.abc import Sequence

from ._wire import Wire


class CandidateRecord(Wire):
    """One candidate's fate. `start` and `stop` are seconds from the group's beginning.

    `end` is set if it was selected, `reason` if it was discarded. `reward` and `correct` are None until told.
    `quality`: its chance to end correct as it was scored on the way; `survival`: the probability that it was kept with.
    """

    index: int
    length: int
    finish_reason: str | None
    selected_as: str | None
    reason: str | None
    rank: int | None
    cut: bool
    start: float | None
    stop: float | None
    weight_version_start: int | None
    weight_version_end: int | None
    trajectory_id: str | None = None
    reward: float | None = None
    correct: bool | None = None
    quality: float | None = None
    survival: float = 1.0


class ShadowRecord(Wire):
    """What a policy would have made of the candidates. `generated` and `returned` are tokens."""

    policy: str
    selection: tuple[int, ...]
    generated: int
    returned: int
    steps: int


class GroupRecord(Wire):
    """Provenance of one group. `duration` and `tail_wait` are seconds, `generated` and `returned` tokens.

    `zero_variance`: whether all its trajectories earned the same; None until all have rewards.
    """

    group_id: str
    prompt_key: str | None
    policy: str
    group_size: int
    outcome: str
    error: str | None
    duration: float
    tail_wait: float | None
    mixed_versions: bool
    generated: int
    returned: int
    deadline: int | None
    explored: bool
    members: tuple[str, ...]
    shadow: ShadowRecord | None
    candidates: tuple[CandidateRecord, ...]
    zero_variance: bool | None = None


class LengthEstimate(Wire):
    """Mean length in tokens of `count` trajectories, and its standard error."""

    mean: float
    se: float | None
    count: int


class PromptRewards(Wire):
    """What the rewards of a prompt's trajectories say.

    `pattern` "I": right ones are shorter than wrong ones; "II": longer; "unclear"; None where too few are known.
    `difference` is the mean length of right ones less that of wrong ones, in tokens.
    """

    rewarded: int
    right: int
    pass_rate: float | None
    zero_variance_groups: int
    rewarded_groups: int
    length_right: LengthEstimate | None
    length_wrong: LengthEstimate | None
    pattern: str | None
    difference: float | None
    difference_se: float | None


class PromptRecord(Wire):
    """What is known of a prompt: its lengths in tokens, and `rewards` once some were told."""

    prompt_key: str
    mean_ema: float
    std_ema: float | None
    groups: int
    candidates: int
    weight_version: int | None
    rewards: PromptRewards | None = None


class UpdateRecord(Wire):
    """How an update of the weights ended. `version` is served after it.

    `outcome`: "completed"; "refused" before the engine was touched; "failed", and the old weights are served; "lost".
    `source`: "push", "disk", "http", "delete", or "vllm" for its own routes. `lora`: name of the LoRA adapter
    that was updated, None for the model itself. `seconds` by phase, such as "transfer", "wait", "load".
    """

    version: int
    outcome: str
    source: str
    rule: str | None
    partial: bool
    seconds: dict[str, float]
    error: str | None
    lora: str | None = None


class LoraRecord(Wire):
    """A LoRA adapter that was pushed, in the update that brought `version`. `scale`: of the product of its matrices."""

    name: str
    version: int
    rank: int
    scale: float


class WeightsRecord(Wire):
    """The weights that are served. `state` is "serving", or how far an update is; "lost" until the server restarts.

    `rule` is for updates that name none. `last` is the last update that ended, `last_error` of the last that failed.
    `intact`: whether all that the model holds is of that version; if not, a trainer died while it wrote, and a full set
    puts it right. `loras`: the LoRA adapters that were pushed.
    """

    version: int
    state: str
    intact: bool = True
    rule: str
    loras: Sequence[LoraRecord] = ()
    last: UpdateRecord | None
    last_error: str | None
