"""The request of a batch, in parts that are not parsed further than needed."""

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import split_objects

DROP = "drop"
TOKENS = "tokens"
MAX_PROMPTS = 100_000


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to divide.

    ``prompts``: as JSON texts. ``keys``: the caller's keys of prompts, by their numbers. ``identities``: what expected
    lengths are learned by. ``fields``: of the request, without prompts. ``metadata``: of the prompts that have any.
    """

    prompts: Sequence[bytes]
    identities: Sequence[Hashable]
    keys: Mapping[int, str]
    metadata: Mapping[int, Any]
    fields: Mapping[str, Any]

    @property
    def stream(self) -> object:
        return self.fields.get("stream", False)

    @property
    def num_groups(self) -> int:
        """Groups that are enough.

        Raises:
            InvalidRequest
        """
        number, count = self.fields.get("num_groups"), len(self.prompts)
        if number is None:
            return count
        if type(number) is not int or not 1 <= number <= count:
            raise InvalidRequest("num_groups", f"must be 1 to {count}, the number of prompts, got {number!r}")
        return number

    def whole(self) -> bytes:
        """Return the request for all prompts, to plan it."""
        return self._request(self.fields, range(len(self.prompts)))

    def part(
        self, numbers: Sequence[int], budget: int | None, *, leads: bool, grants: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return the request for some of the prompts, whose groups are sent as they end.

        ``leads``: whether this part decides if the batch explores. ``grants``: fields that say how many candidates each
        prompt gets, if that was decided for the whole batch.
        """
        fields = {name: value for name, value in self.fields.items() if name not in ("num_groups", "budget")}
        fields["stream"] = self.fields.get("stream") or "groups"
        fields["cohort"] = {"groups": len(self.prompts), "leads": leads, **(grants or {})}
        if budget is not None:
            fields["budget"] = budget
        return self._request(fields, numbers)

    def _request(self, fields: Mapping[str, Any], numbers: Iterable[int]) -> bytes:
        head = json.dumps(fields).encode()
        return head[:-1] + b', "prompts": [' + b",".join(self.prompts[number] for number in numbers) + b"]}"


def read_batch(body: bytes) -> Batch | None:
    """Read a batch; ``None`` if it is for one replica: it is invalid, or has fewer than two prompts, or goes on with
    prompts that one replica keeps.

    Raises:
        InvalidRequest: it has a field that ingresses add.
        TooLarge: it has more than 600,000 strings, arrays and objects.
    """
    head, prompts = split_objects(body, "prompts") or (b"", [])
    if not 2 <= len(prompts) <= MAX_PROMPTS:
        return None
    try:
        fields = json.loads(head)
        parsed = [json.loads(prompt) for prompt in prompts]
    except (ValueError, RecursionError):
        return None
    if fields.pop("prompts", None) != [] or fields.get("carried") or fields.get("carry", DROP) != DROP:
        return None
    if "cohort" in fields:
        raise InvalidRequest("cohort", "is set by the ingress, for the parts of a batch; leave it out")
    keys = {number: prompt["key"] for number, prompt in enumerate(parsed) if isinstance(prompt.get("key"), str)}
    identities = [keys.get(number) or _identity(prompt) for number, prompt in enumerate(parsed)]
    metadata = {number: prompt["metadata"] for number, prompt in enumerate(parsed) if "metadata" in prompt}
    return Batch(prompts, identities, keys, metadata, fields)


def _identity(prompt: Mapping[str, Any]) -> bytes:
    content = [prompt.get(name) for name in ("token_ids", "messages", "text")]
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).digest()
