"""What a caller puts into the queue."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from darts_server.exceptions import TooLarge
from darts_server.rollout.prompt_documents import encode_prompt
from darts_server.rollout.queue.entries import JobId, Terms
from darts_server.rollout.queue.new_entries import NewEntries, NewPrompt, Numbers, build_entries
from darts_server.rollout.queue.prompts import digest_of, encode_terms
from darts_server.types import PromptSpec

MAX_TERMS_BYTES = 1 << 20
"""Of the sampling parameters and policy of a put."""


@dataclass(frozen=True, slots=True)
class Put:
    """Prompts that a caller puts into a job.

    ``names``: the caller's ids, ``None`` for one of ours. ``options``: of the job, those that change; see `JobOptions`.
    ``taken``: how many of its groups count as taken from now on. ``key``, ``digest``: an idempotency key, and a hash of
    the request.
    """

    job: str
    prompts: Sequence[PromptSpec]
    names: Sequence[str | None]
    terms: Terms
    priority: int = 0
    options: Mapping[str, object] | None = None
    taken: int | None = None
    key: str | None = None
    digest: str = ""

    def build(self, job_id: JobId, numbers: Numbers, now: float, new_name: Callable[[], str]) -> NewEntries:
        """Build its entries, for a thread. ``now``: Unix seconds.

        Raises:
            TooLarge: the sampling parameters and the policy.
            Conflict: one id is that of two different prompts.
        """
        terms = encode_terms(self.terms, self.priority)
        if len(terms) > MAX_TERMS_BYTES:
            raise TooLarge("sampling", f"and policy must have at most {MAX_TERMS_BYTES} bytes in the queue; send less")
        documents = map(encode_prompt, self.prompts)
        prompts = [
            NewPrompt(document, digest_of(document, terms), name, prompt.key)
            for prompt, document, name in zip(self.prompts, documents, self.names, strict=True)
        ]
        return build_entries(job_id, prompts, numbers, now, new_name, self.priority)


def terms_of(group_size: int, sampling: Mapping[str, Any], policy: Mapping[str, Any]) -> Terms:
    """Return terms that are the same after they were written and read."""
    return Terms(group_size, json.loads(json.dumps(dict(sampling))), json.loads(json.dumps(dict(policy))))
