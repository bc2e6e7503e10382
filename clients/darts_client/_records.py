"""The server's records of groups, prompts and weights."""

from collections.abc import Sequence

from ._models import WireModel


class CandidateRecord(WireModel):
    """The outcome of one candidate. It has a `selected_as` or a discard `reason`."""

    index: int
    length: int
    """Number of generated tokens."""
    finish_reason: str | None
    selected_as: str | None
    reason: str | None
    rank: int | None
    """Place among the selected candidates, 0 for the shortest; None for a discarded candidate."""
    cut: bool
    # Seconds since the start of the group.
    start: float | None
    stop: float | None
    weight_version_start: int | None
    weight_version_end: int | None
    trajectory_id: str | None = None
    reward: float | None = None
    correct: bool | None = None
    quality: float | None = None
    """Predicted probability of a correct answer, or None if it was not scored while it ran."""
    survival: float = 1.0
    """Probability with which pruning kept it."""
    weight: float | None = None
    """1 / (probability of its return), or None."""
    advantage: float | None = None
    """Reward minus the mean reward of the candidates, or None unless the policy selects by rewards."""
    turns: int | None = None
    """Answered turns of a session."""
    tool_seconds: float | None = None


class GroupRecord(WireModel):
    """Provenance of one group. See `Group` for the fields of the same names."""

    group_id: str
    prompt_key: str | None
    policy: str
    group_size: int
    outcome: str
    error: str | None
    # Seconds.
    duration: float
    tail_wait: float | None
    mixed_versions: bool
    # Numbers of tokens.
    generated: int
    returned: int
    deadline: int | None
    explored: bool
    members: tuple[str, ...]
    candidates: tuple[CandidateRecord, ...]
    num_eligible: int | None = None
    num_shortest: int | None = None
    sampled_from: int | None = None
    earlier_pass_rate: float | None = None
    num_rewarded: int | None = None
    decided_early: bool = False
    run_probability: float | None = None
    """Probability that the batch ran the prompt, or None. The group's weight is its inverse."""
    zero_variance: bool | None = None
    """Whether all trajectories have the same reward, or None before all have a reward."""

    @property
    def selected(self) -> tuple[CandidateRecord, ...]:
        """Returned candidates by index. The choices of an answer that is not streamed have the same order."""
        return tuple(candidate for candidate in self.candidates if candidate.selected_as is not None)


class PromptRewards(WireModel):
    """Statistics of the rewards of a prompt's trajectories."""

    rewarded: int
    right: int
    pass_rate: float | None
    zero_variance_groups: int
    rewarded_groups: int
    difference: float | None
    """Mean tokens of correct trajectories minus mean tokens of wrong trajectories, or None below ten of each. Above 0,
    long answers are worth their tokens."""


class PromptRecord(WireModel):
    """Statistics of a prompt. Unknown values are None."""

    prompt_key: str
    estimated_mean_tokens: float
    """Average over groups of the mean length if no candidate was stopped or truncated."""
    estimated_std_tokens: float | None
    groups: int
    candidates: int
    weight_version: int | None
    # Of the candidates of the last group: the mean number of tokens, and the numbers of candidates that ended with a
    # stop token or string, reached `max_tokens`, or were stopped or cut.
    mean_generated_tokens: float | None = None
    finished: int | None = None
    truncated: int | None = None
    stopped: int | None = None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    rewards: PromptRewards | None = None


class UpdateRecord(WireModel):
    """The result of an update of the weights."""

    version: int
    """Version that is served after the update."""
    outcome: str
    """`completed`; `refused` before the engine was changed; `failed`, with the old weights still served; `lost`."""
    source: str
    """`push`, `disk`, `delete`, or `vllm` for vLLM's own routes."""
    rule: str | None
    partial: bool
    seconds: dict[str, float]
    """Seconds of each phase, such as `transfer`, `wait` and `load`."""
    error: str | None
    lora: str | None = None
    """Name of the updated LoRA adapter, or None for the model itself."""


class LoraRecord(WireModel):
    """A LoRA adapter that is served. `scale` multiplies the product B A."""

    name: str
    version: int
    """Version of the adapter's update."""
    rank: int
    scale: float


class WeightsRecord(WireModel):
    """The weights that are served."""

    version: int
    state: str
    """`serving`, the phase of an update, or `lost` until the server restarts."""
    intact: bool = True
    """Whether all tensors are of that version. If not, a trainer died while it wrote them; send a full set."""
    rule: str
    """Default rule of updates."""
    loras: Sequence[LoraRecord] = ()
    last: UpdateRecord | None
    last_error: str | None
    """Error of the last failed update."""
