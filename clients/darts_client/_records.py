"""The server's records of groups, prompts and weights."""

from collections.abc import Sequence

from ._models import WireModel


class CandidateRecord(WireModel):
    """The outcome of one candidate. `start` and `stop` are seconds since the start of the group.

    `selected_as` is set if it was selected, `reason` if it was discarded. `reward` and `correct` are None until they
    are reported. `quality`: the probability of a correct answer that was predicted while it ran; `survival`: the
    probability with which it was kept; `weight`: 1 / (its probability to be returned).
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
    weight: float | None = None


class GroupRecord(WireModel):
    """Provenance of one group. `duration` and `tail_wait` are seconds, `generated` and `returned` tokens.

    `zero_variance`: whether all its trajectories have the same reward; None until all have one. `earlier_pass_rate`:
    the share of right ones among the prompt's trajectories that had rewards when the group started; None without any.
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
    candidates: tuple[CandidateRecord, ...]
    counted: int | None = None
    num_shortest: int | None = None
    sampled_from: int | None = None
    earlier_pass_rate: float | None = None
    zero_variance: bool | None = None

    @property
    def selected(self) -> tuple[CandidateRecord, ...]:
        """The returned candidates by index: the choices of an answer that is not streamed are in this order."""
        return tuple(candidate for candidate in self.candidates if candidate.selected_as is not None)


class PromptRewards(WireModel):
    """Statistics of the rewards of a prompt's trajectories.

    `difference` is the mean length of correct ones minus that of wrong ones, in tokens: above 0, long answers are worth
    their tokens. It is None before there are ten of each.
    """

    rewarded: int
    right: int
    pass_rate: float | None
    zero_variance_groups: int
    rewarded_groups: int
    difference: float | None


class PromptRecord(WireModel):
    """Statistics of a prompt: its lengths in tokens, and `rewards` once some were reported.

    `estimated_mean_tokens` and `estimated_std_tokens` are averages over groups of what the lengths would be if no
    candidate was stopped or truncated. `mean_generated_tokens` is what the candidates of the last group have generated;
    of these `finished` ended by themselves, `truncated` ended at `max_tokens`, and `stopped` were stopped or cut before
    their end. What is not known is None.
    """

    prompt_key: str
    estimated_mean_tokens: float
    estimated_std_tokens: float | None
    groups: int
    candidates: int
    weight_version: int | None
    mean_generated_tokens: float | None = None
    finished: int | None = None
    truncated: int | None = None
    stopped: int | None = None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    rewards: PromptRewards | None = None


class UpdateRecord(WireModel):
    """The result of an update of the weights. `version` is served after it.

    `outcome`: "completed"; "refused" before the engine was changed; "failed", with the old weights still served;
    "lost". `source`: "push", "disk", "delete", or "vllm" for vLLM's own routes.
    `lora`: the name of the LoRA adapter that was updated, None for the model itself. `seconds` by phase, such as
    "transfer", "wait", "load".
    """

    version: int
    outcome: str
    source: str
    rule: str | None
    partial: bool
    seconds: dict[str, float]
    error: str | None
    lora: str | None = None


class LoraRecord(WireModel):
    """A LoRA adapter that is served, from the update that had `version`. `scale` multiplies the product B A."""

    name: str
    version: int
    rank: int
    scale: float


class WeightsRecord(WireModel):
    """The weights that are served. `state` is "serving", or the phase of an update; "lost" until the server restarts.

    `rule` applies to updates that name none. `last` is the last update, `last_error` the error of the last failed one.
    `intact`: whether all tensors are of that version; if not, a trainer died while it was writing them, and a full set
    repairs them. `loras`: the LoRA adapters that are served.
    """

    version: int
    state: str
    intact: bool = True
    rule: str
    loras: Sequence[LoraRecord] = ()
    last: UpdateRecord | None
    last_error: str | None
