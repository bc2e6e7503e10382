"""Request and response models of ``/darts/v1/rollouts``."""

import json
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Raw
from pydantic import (
    BaseModel,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    SerializationInfo,
    StrictInt,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core.core_schema import no_info_after_validator_function

from darts_server.exceptions import DartsError, InvalidRequest, TooLarge
from darts_server.http.body import Body
from darts_server.http.errors import error_fields
from darts_server.http.resources.trajectories import (
    Advantage,
    CorrectByVerifier,
    Cut,
    DiscardedOut,
    GeneratedOut,
    GroupFacts,
    Quality,
    RewardByVerifier,
    SampleOut,
    Sampling,
    SelectedAs,
    UsageOut,
    Weight,
    copy_shared_fields,
    list_discarded,
    make_trajectory_fields,
)
from darts_server.identifiers import NAME_CHARS, Name
from darts_server.records import CandidateRecord
from darts_server.rollout.batches.batch import BatchRequest
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.batches.events import BatchDone, GroupResult, Unfinished
from darts_server.types import FinishReason, PromptSpec
from darts_server.verify.types import NO_VERDICT

MAX_PROMPTS = 100_000
MAX_OPTION_BYTES = 256 * 1024
"""Limit of a prompt's tools, and of its template's arguments. A hundred tools with their descriptions have less."""
MAX_TOOLS = 1024
"""vLLM validates all tools before it names the first wrong tool: some milliseconds."""
MAX_SHARED_BYTES = 64 * 1024 * 1024
"""Limit of the bytes of a batch's chat options, times the chats that are rendered with them."""


def _keep_as_json(kind: Any, max_bytes: int | None = None) -> GetPydanticSchema:
    """Validate a field as ``kind``, and keep it as JSON, which takes a fraction of the memory."""

    def encode(value: object) -> bytes:
        # The standard library, because msgspec refuses integers of more than 64 bits.
        encoded = json.dumps(
            value,
            allow_nan=False,
            ensure_ascii=False,
            separators=(",", ":"),
        ).encode()
        if max_bytes is not None and len(encoded) > max_bytes:
            raise ValueError(f"must have at most {max_bytes} bytes as JSON, got {len(encoded)}; send less")
        return encoded

    return GetPydanticSchema(lambda _, handler: no_info_after_validator_function(encode, handler(kind)))


def _dump_metadata(metadata: bytes | None, info: SerializationInfo) -> Any:
    if metadata is None:
        return None
    # pydantic's own JSON needs objects.
    if info.mode_is_json():
        return json.loads(metadata)
    # `encode_json` gets the text, because msgspec does not encode numbers of more than 64 bits.
    return Raw(metadata)


Metadata = Annotated[
    Any,
    PlainSerializer(_dump_metadata),
    WithJsonSchema({"anyOf": [{"additionalProperties": True, "type": "object"}, {"type": "null"}]}),
]


def _replace_errors(message: str) -> WrapValidator:
    """Replace all of pydantic's errors for a field by this message."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(validate)


VerifierNames = Annotated[
    Annotated[list[Name], Field(min_length=1)] | Literal[False] | None,
    _replace_errors('must be false or a list of names, such as ["compute_score"]'),
]
Only = Annotated[Literal["informative"] | None, _replace_errors('must be "informative"; omit it to return all groups')]
TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True)]
JsonObject = Annotated[bytes, _keep_as_json(dict[str, Any])]
Messages = Annotated[bytes, _keep_as_json(Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)])]
Tools = Annotated[
    bytes,
    _keep_as_json(
        Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)], MAX_OPTION_BYTES
    ),
]
TemplateKwargs = Annotated[bytes, _keep_as_json(dict[str, Any], MAX_OPTION_BYTES)]


class ChatOptionsIn(Body):
    """Options of the chat template, by the names of vLLM's chat route."""

    chat_template_kwargs: TemplateKwargs | None = Field(
        None, description="Arguments of the chat template, such as `enable_thinking`."
    )
    tools: Tools | None = Field(None, description="Functions that the chat template shows, in OpenAI's form.")
    add_generation_prompt: bool | None = Field(
        None, description="Whether the prompt ends with the beginning of an answer. Default: true."
    )
    continue_final_message: bool | None = Field(
        None,
        description="Whether the answer continues the last message. Needs `add_generation_prompt` to be false.",
    )

    def chat_options(self) -> dict[str, Raw]:
        """Return the options in the request as JSON, by name."""
        options = {}
        for name in ChatOptionsIn.model_fields:
            value = getattr(self, name)
            # Fields of bytes were encoded by `_keep_as_json`.
            if isinstance(value, bytes):
                options[name] = Raw(value)
            elif value is not None:
                options[name] = Raw(msgspec.json.encode(value))
        return options

    def check_prompt_form(self, *forms: str) -> None:
        """Raise ValueError unless one of the fields ``forms`` is given, and it has messages if there are options."""
        given = [name for name in forms if getattr(self, name) is not None]
        if len(given) != 1:
            choice = f"{', '.join(forms[:-1])} and {forms[-1]}"
            raise ValueError(f"give exactly one of {choice}, got {given or 'none'}")
        options = self.chat_options()
        if options and given != ["messages"]:
            raise ValueError(f"{next(iter(options))} is for messages alone; leave it out, or send messages")


def merge_chat_options(of_batch: dict[str, Raw], of_prompt: dict[str, Raw]) -> dict[str, Raw]:
    merged = of_batch | of_prompt
    name = "chat_template_kwargs"
    # The template's arguments are merged one by one.
    if name in of_batch and name in of_prompt:
        batch_arguments = msgspec.json.decode(of_batch[name], type=dict[str, Raw])
        prompt_arguments = msgspec.json.decode(of_prompt[name], type=dict[str, Raw])
        merged[name] = Raw(msgspec.json.encode(batch_arguments | prompt_arguments))
    return merged


class PromptIn(ChatOptionsIn):
    """A prompt, as exactly one of token ids, messages and text."""

    token_ids: TokenIds | None = Field(None, min_length=1)
    messages: Messages | None = Field(None, description="A chat, in OpenAI's form.")
    text: str | None = Field(None, min_length=1)
    key: Name | None = Field(None, description="Name of the prompt in statistics. By default its tokens are the name.")
    metadata: JsonObject | None = Field(
        None, description="Returned with the group unchanged. Verifiers read its fields, such as `answer`."
    )
    verifier: VerifierNames = Field(
        None, description="Verifiers of this prompt, in place of the batch's `verifier`. `false`: none."
    )

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        self.check_prompt_form("token_ids", "messages", "text")
        return self


class RolloutsIn(ChatOptionsIn):
    """A batch of prompts. Its chat options hold for all messages; the options of a prompt override them."""

    prompts: list[PromptIn] = Field(
        max_length=MAX_PROMPTS, fail_fast=True, description='At least one, unless "carried" has some.'
    )
    group_size: int = Field(ge=1, description="Trajectories returned per prompt.")
    sampling: dict[str, Any] = Field({}, description="vLLM's sampling parameters, by their names.")
    policy: dict[str, Any] = Field(
        {}, description="`name`: the policy; other keys: runtime settings to override for this batch."
    )
    budget: int | None = Field(None, ge=1, description="Candidates of the whole batch; by default the policy decides.")
    num_groups: int | None = Field(
        None,
        ge=1,
        description="Number of groups to return. When so many are complete, the others are stopped. Default: all.",
    )
    survivors: bool | None = Field(
        None,
        description="Under a policy that prunes: return all trajectories not pruned, more or fewer than `group_size`. "
        "Default: true for `arrol`.",
    )
    carry: Carry = Field(
        Carry.DROP,
        description="With `num_groups`, what happens to prompts whose groups were stopped. `restart`: the prompts are "
        "kept, and start first in a later batch that has them, or that has `carried`. `resume`: the "
        "tokens of their candidates are kept too, and the candidates continue.",
    )
    carried: bool = Field(False, description="Add all other prompts that were carried over from your earlier batches.")
    verifier: VerifierNames = Field(
        None,
        description="Names of the server's verifiers that give rewards to finished candidates. Default: all. `false`: "
        "none.",
    )
    only: Only = Field(
        None,
        description='"informative": groups whose rewards are all equal, or missing, do not count for `num_groups`. '
        "Other prompts of the batch take their places. This is dynamic sampling, which biases the gradient.",
    )
    max_prompts: int | None = Field(
        None, ge=1, description="Only with `only`: number of prompts that may run. Default: all."
    )
    return_zero_variance: bool = Field(
        False, description="Only with `only`: return groups that do not count, too, with `zero_variance`."
    )
    stop_when: Literal["decided"] | None = Field(
        None,
        description='"decided", under `informative`: a group ends as soon as `group_size` candidates have rewards that '
        "are not all equal. Its trajectories have no weights, because this biases the gradient.",
    )
    stream: Literal[False, "groups", "tokens"] = Field(
        False, description='Stream server-sent events: "groups" as they are decided, or "tokens" as they are generated.'
    )
    chunk_tokens: int = Field(
        100, ge=1, description='Minimum tokens of a candidate per event. Only with "stream": "tokens".'
    )

    @field_validator("policy", mode="before")
    @classmethod
    def _check_policy(cls, value: object) -> object:
        if isinstance(value, str):
            # Long names are not repeated.
            name = value if len(value) <= NAME_CHARS else "NAME"
            raise ValueError(f'must be an object; write {{"name": {json.dumps(name)}}}')
        return value

    @field_validator("chunk_tokens")
    @classmethod
    def _check_chunk_tokens(cls, value: int, info: ValidationInfo) -> int:
        # Called only if the caller has sent the field.
        if info.data.get("stream") != "tokens":
            raise ValueError('is only valid with "stream": "tokens"; omit it')
        return value

    @field_validator("max_prompts", "return_zero_variance")
    @classmethod
    def _check_only(cls, value: object, info: ValidationInfo) -> object:
        if info.data.get("only") is None:
            raise ValueError('is only valid with "only": "informative"; omit it')
        return value

    def to_batch_request(self) -> BatchRequest:
        batch_options = self.chat_options()
        encoded_batch_options = None
        if batch_options:
            encoded_batch_options = msgspec.json.encode(batch_options)
            self._check_chat_options(batch_options, len(encoded_batch_options))

        prompts = []
        for prompt in self.prompts:
            options = None
            if prompt.messages is not None:
                # Prompts without options of their own share one object, because a batch may have 100,000 chats.
                options = encoded_batch_options
                prompt_options = prompt.chat_options()
                if prompt_options:
                    options = msgspec.json.encode(merge_chat_options(batch_options, prompt_options))
            prompts.append(
                PromptSpec(
                    prompt.token_ids,
                    prompt.messages,
                    prompt.text,
                    prompt.key,
                    prompt.metadata,
                    options,
                    _verifier_names(prompt.verifier),
                )
            )
        # The others are fields of `BatchRequest` under the same names.
        form_of_answer = {"stream", "chunk_tokens"}
        other_fields = self.model_dump(exclude={"prompts", *form_of_answer, *ChatOptionsIn.model_fields})
        other_fields["verifier"] = _verifier_names(self.verifier)
        return BatchRequest(prompts, **other_fields)

    def _check_chat_options(self, options: dict[str, Raw], encoded_bytes: int) -> None:
        num_chats = sum(prompt.messages is not None for prompt in self.prompts)
        if not num_chats:
            raise InvalidRequest(
                next(iter(options)),
                "is for prompts with messages alone, and there is none (carried prompts keep their own)",
            )
        if encoded_bytes * num_chats > MAX_SHARED_BYTES:
            largest = max(options, key=lambda name: len(bytes(options[name])))
            raise TooLarge(
                largest,
                f"is rendered with each of {num_chats} prompts: the batch's chat options may have at most "
                f"{MAX_SHARED_BYTES // num_chats} bytes together; send fewer prompts per request",
            )


Shortfall = Annotated[
    int, Field(description="Number of groups by which the answer has fewer than `num_groups`, by default all prompts.")
]
Uninformative = Annotated[
    list[int],
    Field(
        description="With `only`: numbers of the prompts whose groups did not count, because their rewards are equal "
        "or missing."
    ),
]


class TrajectoryOut(SampleOut):
    """A returned trajectory."""

    rank: int = Field(description="Place in the group by length, 0 for the shortest.")
    selected_as: SelectedAs
    cut: Cut
    quality: Quality
    weight: Weight
    reward: RewardByVerifier
    correct: CorrectByVerifier
    advantage: Advantage


class AbortedCandidateOut(GeneratedOut):
    """The output of a candidate whose group was aborted."""

    finish_reason: FinishReason | Literal["abort"] = Field(description="`abort` unless the candidate had finished.")
    cut: Cut


class GroupOut(GroupFacts):
    """The group of one prompt, or its error."""

    number: int = Field(
        description="Index of its prompt in the request. Prompts of `carried` follow the request's prompts."
    )
    group_id: str
    prompt_key: str
    metadata: Metadata
    candidates: int
    mask: list[bool] = Field(description="For each started candidate, by index, whether it was returned.")
    aborted: list[AbortedCandidateOut] | None = Field(
        description="Output of the candidates of an aborted group. None of them was selected. Null if the group was "
        "not aborted."
    )
    trajectories: list[TrajectoryOut]
    discarded: list[DiscardedOut]
    zero_variance: bool | None = Field(
        description="Whether the verifier's rewards are all equal: of all candidates under `informative`, and else of "
        "the trajectories. Missing rewards do not count. Null if all are missing."
    )
    seconds: float | None
    error: dict[str, Any] | None

    @classmethod
    def of(cls, result: GroupResult) -> Self:
        record = result.record
        candidates = _candidates_by_index(result)
        # A group that failed before it ran has no record.
        facts: dict[str, Any] = {name: getattr(record, name, None) for name in GroupFacts.model_fields}
        facts["mixed_versions"] = record is not None and record.mixed_versions
        facts["decided_early"] = record is not None and record.decided_early
        # `num_eligible` is the number that the weights stand for, and candidates of a failed group have no weights.
        if result.error is not None:
            facts["num_eligible"] = None

        # Ties go to the lower index.
        by_length = sorted(result.samples, key=lambda index: (len(result.samples[index].token_ids), index))
        ranks = {index: rank for rank, index in enumerate(by_length)}
        trajectories = []
        for index, sample in sorted(result.samples.items()):
            fields = make_trajectory_fields(TrajectoryOut, f"{result.group_id}:{index}", sample, candidates[index])
            # The verdict may have come after the record was made.
            verdict = result.verdicts.get(index, NO_VERDICT)
            fields["reward"] = verdict.reward
            fields["correct"] = verdict.correct
            trajectories.append(TrajectoryOut(**fields, rank=ranks[index]))

        return cls(
            number=result.number,
            group_id=result.group_id,
            prompt_key=result.prompt_key,
            metadata=result.metadata,
            candidates=len(candidates),
            **facts,
            mask=[index in result.samples for index in sorted(candidates)],
            aborted=_convert_aborted(result),
            trajectories=trajectories,
            discarded=list_discarded(result.group_id, candidates.values(), result.aborted or (), result.verdicts),
            zero_variance=result.zero_variance,
            seconds=None if record is None else record.ended_at - record.started_at,
            error=None if result.error is None else describe_error(result.error),
        )


def _verifier_names(names: list[str] | Literal[False] | None) -> list[str] | None:
    # A caller's ``false`` means no verifier, and None means the default.
    return [] if names is False else names


def sum_usage(done: BatchDone) -> UsageOut:
    returned = sum(len(sample.token_ids) for group in done.results for sample in group.samples.values())
    return UsageOut.of(done.generated, returned, done.seconds)


class UnfinishedOut(BaseModel):
    """A prompt whose group was not decided."""

    number: int
    prompt_key: str
    metadata: Metadata
    carry: Carry = Field(description="How it is kept for later batches.")
    error: dict[str, Any] | None = Field(
        description="Why its group was aborted; null if it was stopped because enough other groups were complete."
    )
    skipped: bool = Field(
        description="Whether it did not run, because its rewards were almost surely equal (`skip_floor`)."
    )
    aborted: list[AbortedCandidateOut] | None = Field(
        description="Output of its candidates, if the server stops and the next server cannot continue them; else null."
    )

    @classmethod
    def of(cls, unfinished: Unfinished) -> Self:
        error = None if unfinished.error is None else describe_error(unfinished.error)
        aborted = None if unfinished.group is None else _convert_aborted(unfinished.group)
        return cls(**copy_shared_fields(cls, unfinished) | {"error": error, "aborted": aborted})


class RolloutsOut(BaseModel):
    """The groups, in the order of the prompts."""

    id: str
    policy: str
    groups: list[GroupOut]
    survivors: bool = Field(
        description="Whether groups have all trajectories that were not pruned, in place of `group_size`."
    )
    sampling: Sampling
    unfinished: list[UnfinishedOut]
    carried: int = Field(description="Number of your prompts that are kept for later batches.")
    shortfall: Shortfall
    uninformative: Uninformative
    skipped: int = Field(description="Number of the unfinished prompts that did not run (`skip_floor`).")
    usage: UsageOut


class CancelledOut(BaseModel):
    """``cancelled``: whether the batch was still running."""

    id: str
    cancelled: bool


def _candidates_by_index(result: GroupResult) -> dict[int, CandidateRecord]:
    candidates = () if result.record is None else result.record.candidates
    return {candidate.index: candidate for candidate in candidates}


def _convert_aborted(result: GroupResult) -> list[AbortedCandidateOut] | None:
    if result.aborted is None:
        return None
    candidates = _candidates_by_index(result)
    converted = []
    for index, aborted in result.aborted.items():
        trajectory_id = f"{result.group_id}:{index}"
        fields = make_trajectory_fields(AbortedCandidateOut, trajectory_id, aborted.sample, candidates[index])
        # The record was made before the engine returned the last tokens, so its own spans may lack them.
        spans = list(aborted.version_spans)
        fields["finish_reason"] = aborted.sample.finish_reason or "abort"
        fields["version_spans"] = spans
        fields["weight_version_start"] = spans[0][0] if spans else None
        fields["weight_version_end"] = spans[-1][0] if spans else None
        converted.append(AbortedCandidateOut(**fields))
    return converted


def describe_error(error: Exception) -> dict[str, Any]:
    if not isinstance(error, DartsError):
        error = DartsError(f"{type(error).__name__}: {error}")
    return error_fields(error)
