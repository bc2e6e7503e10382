"""Observations as JSON: how this server writes them, and how it reads those of another one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import Body
from darts_server.identifiers import Name
from darts_server.records import CandidateRecord, ChosenOption, GroupRecord
from darts_server.rollout.exchange.observations import (
    EndedGroup,
    FirstExploration,
    NewRewards,
    Observation,
    OriginalObservation,
    RewardedGroup,
)
from darts_server.types import FinishReason, MaxLost, Outcome, SelectedAs

LARGEST = 2**52
"""Of lengths in tokens, and of factors on them."""
MAX_CANDIDATES = 16_384
"""Of a group."""
MAX_KEY_CHARS = 64 * 1024
"""A whole prompt may be its own key."""
MAX_PROMPTS = 16_384
"""Of one observation."""
MAX_OBSERVATIONS = 4096
"""Of a request."""
Tokens = Annotated[int, Field(ge=0, le=LARGEST)]
Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)] | None


class CandidateIn(Body):
    """A candidate of an ended group."""

    tokens: Tokens
    finish_reason: FinishReason | None = Field(None, description="Null for a candidate that was stopped.")
    selected: bool = False
    cut: bool = False
    weight: float | None = Field(None, gt=0, le=LARGEST, allow_inf_nan=False)
    correct: bool | None = Field(None, description="In a `rewarded_group`, of its trajectories.")


class Origin(Body):
    """Where an observation was made."""

    life: str = Field(min_length=1, max_length=64, description="Of the server: another one after each restart.")
    number: int = Field(ge=1, le=LARGEST, description="Of the observation in that life.")


class MaxLostIn(Body):
    """What a deadline may take away of right answers."""

    answers: float = Field(ge=0, le=1, allow_inf_nan=False, description="Share of all of them.")
    groups: float = Field(ge=0, le=1, allow_inf_nan=False, description="Share of the groups that lose all of theirs.")


class GroupIn(Origin):
    """`group`: a completed group. `rewarded_group`: one with a deadline, all trajectories of which have rewards."""

    kind: Literal["group", "rewarded_group"]
    prompt_key: Key = None
    policy: Name
    option: Name | None = Field(None, description="Under `auto`.")
    size: int = Field(ge=1, le=LARGEST)
    weight_version: int = Field(0, ge=0, le=LARGEST)
    candidates: list[CandidateIn] = Field(max_length=MAX_CANDIDATES)
    tokens_needed: Tokens | None = None
    max_lost: MaxLostIn | None = Field(None, description="Null if its policy has no deadlines.")
    cohort_deadline: int | None = Field(None, ge=1, le=LARGEST)
    bound: int | None = Field(None, ge=1, le=LARGEST)
    stretch: float = Field(1.0, ge=1, le=LARGEST, allow_inf_nan=False)
    completion_length: Tokens | None = None
    explored: bool = False

    def to_observation(self, _: str) -> Observation:
        """Return the observation."""
        if self.kind == "group":
            return EndedGroup(self._record())
        return RewardedGroup(
            self._record(), {i: c.correct for i, c in enumerate(self.candidates) if c.correct is not None}
        )

    def _record(self) -> GroupRecord:
        return GroupRecord(
            group_id="",
            prompt_key=self.prompt_key,
            policy=self.policy,
            size=self.size,
            outcome=Outcome.COMPLETED,
            candidates=[self._candidate(*each) for each in enumerate(self.candidates)],
            started_at=0.0,
            ended_at=0.0,
            tail_wait=None,
            cohort_deadline=self.cohort_deadline,
            max_lost=None if self.max_lost is None else MaxLost(self.max_lost.answers, self.max_lost.groups),
            stretch=self.stretch,
            bound=self.bound,
            completion_length=self.completion_length,
            explored=self.explored,
            tokens_needed=self.tokens_needed,
            chosen=None if self.option is None else ChosenOption(self.option, ""),
        )

    def _candidate(self, index: int, candidate: CandidateIn) -> CandidateRecord:
        return CandidateRecord(
            index=index,
            tokens=candidate.tokens,
            finish_reason=candidate.finish_reason,
            selected_as=SelectedAs.FILL if candidate.selected else None,
            reason=None,
            cut=candidate.cut,
            started_at=None,
            ended_at=None,
            weight_version_start=self.weight_version,
            weight_version_end=self.weight_version,
            weight=candidate.weight,
        )


class PromptRewardsIn(Body):
    """Statistics of newly rewarded trajectories of a prompt."""

    prompt_key: Key = None
    right: list[float] = Field(min_length=5, max_length=5, description="Moments of the lengths of correct ones.")
    wrong: list[float] = Field(min_length=5, max_length=5)
    groups: list[int] = Field(
        min_length=2, max_length=2, description="Fully rewarded ones, and those without variance."
    )


class RewardsObservedIn(Origin):
    """`rewards`: newly rewarded trajectories."""

    kind: Literal["rewards"]
    prompts: list[PromptRewardsIn] = Field(max_length=MAX_PROMPTS)

    def to_observation(self, where: str) -> Observation:
        """
        Raises:
            InvalidRequest: no trajectories have these statistics.
        """
        states = {
            each.prompt_key: [_moments(each.right), _moments(each.wrong), list(each.groups)] for each in self.prompts
        }
        try:
            return NewRewards.restore(states)
        except ValueError as error:
            raise InvalidRequest(f"{where}.prompts", str(error)) from error


class ExplorationIn(Origin):
    """`exploration`: groups that explore because few were rewarded."""

    kind: Literal["exploration"]
    policy: Name
    groups: int = Field(ge=1, le=LARGEST)

    def to_observation(self, _: str) -> Observation:
        """Return the observation."""
        return FirstExploration(self.policy, self.groups)


ObservationIn = Annotated[GroupIn | RewardsObservedIn | ExplorationIn, Field(discriminator="kind")]


class ObservationsIn(Body):
    """Observations of other servers. Those of one server come in order."""

    observations: list[ObservationIn] = Field(max_length=MAX_OBSERVATIONS)

    def to_observations(self) -> list[OriginalObservation]:
        """
        Raises:
            InvalidRequest: names the first one that cannot be used.
        """
        return [
            OriginalObservation(each.life, each.number, each.to_observation(f"observations[{place}]"))
            for place, each in enumerate(self.observations)
        ]


class LearnedAnswer(BaseModel):
    """What became of observations."""

    learned: int
    repeated: int = Field(description="Learned from before, or this server's own.")
    missed: int = Field(description="Older ones of the same servers that never came.")


class ObservationsAnswer(BaseModel):
    """Observations of this server, and how far it has learned from those of others."""

    life: str = Field(description="Of this server: another one after each restart, and after a restore of its state.")
    last: int = Field(description="Number of its newest observation.")
    observations: list[dict[str, Any]]
    learned: dict[str, int] = Field(description="Number of the last observation that it has learned from, by life.")
    is_new: bool = Field(description="Whether it has learned nothing yet.")


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes JSON objects of the observations of a life. Fields with their default value are omitted."""

    life: str

    def encode(self, number: int, observation: Observation) -> dict[str, Any]:
        """Return the observation as `ObservationIn` reads it."""
        origin: dict[str, Any] = {"life": self.life, "number": number}
        match observation:
            case EndedGroup(record):
                return {**origin, "kind": "group", **_group(record), "candidates": _candidates(record, {})}
            case RewardedGroup(record, correct):
                candidates = _candidates(record, correct)
                return {**origin, "kind": "rewarded_group", **_group(record), "candidates": candidates}
            case NewRewards(stats):
                prompts = []
                for key, each in stats.items():
                    right, wrong, groups = each.state
                    prompts.append({"prompt_key": key, "right": right, "wrong": wrong, "groups": groups})
                return {**origin, "kind": "rewards", "prompts": prompts}
            case FirstExploration(policy, groups):
                return {**origin, "kind": "exploration", "policy": policy, "groups": groups}


def _moments(numbers: Sequence[float]) -> Sequence[float]:
    """Return the moments as they are restored: the first of them is a count."""
    return [int(numbers[0]) if numbers[0].is_integer() else numbers[0], *numbers[1:]]


def _group(record: GroupRecord) -> dict[str, Any]:
    fields = {
        "prompt_key": record.prompt_key,
        "policy": record.policy,
        "option": None if record.chosen is None else record.chosen.option,
        "size": record.size,
        "weight_version": max((c.weight_version_end or 0 for c in record.selected), default=0),
        "tokens_needed": record.tokens_needed,
        "max_lost": None if record.max_lost is None else asdict(record.max_lost),
        "cohort_deadline": record.cohort_deadline,
        "bound": record.bound,
        "stretch": record.stretch,
        "completion_length": record.completion_length,
        "explored": record.explored,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _candidates(record: GroupRecord, correct: Mapping[int, bool]) -> list[dict[str, Any]]:
    """Return the candidates since the last restart: nothing is learned from earlier ones."""
    return [
        {
            name: value
            for name, value in (
                ("tokens", c.tokens),
                ("finish_reason", c.finish_reason),
                ("selected", c.selected_as is not None or None),
                ("cut", c.cut or None),
                ("weight", c.weight),
                ("correct", correct.get(c.index)),
            )
            if value is not None
        }
        for c in record.candidates[record.restarted_from :]
    ]
