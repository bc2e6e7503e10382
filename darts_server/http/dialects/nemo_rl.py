"""NeMo-RL, read at version 0.6.0 (August 2026): ``nemo_rl/models/generation/dynamo/dynamo_generation.py``.

It samples from an NVIDIA Dynamo front end by ``/v1/completions`` with token ids and ``n`` = 1, and reads the tokens of
the answer from ``nvext.completion_token_ids``, which it requests by ``nvext.extra_fields``.
"""

from collections.abc import Mapping
from typing import Any

from darts_server.exceptions import InvalidRequest

TOKEN_IDS = "completion_token_ids"


class CompletionTokenIds:
    """Adds ``nvext`` to the answer of a completions request that has ``nvext``."""

    def before(self, request: Any) -> None:
        """Check a parsed request of any of vLLM's generation routes, and request its token ids.

        Raises:
            InvalidRequest
        """
        nvext = getattr(request, "nvext", None)
        if nvext is None:
            return
        fields = nvext.get("extra_fields") if isinstance(nvext, Mapping) else None
        if fields != [TOKEN_IDS] or len(nvext) > 1:
            raise InvalidRequest("nvext", f'must be {{"extra_fields": ["{TOKEN_IDS}"]}}, which alone is served')
        prompt = getattr(request, "prompt", None)
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            raise InvalidRequest("nvext", "is served on /v1/completions alone, for one prompt of token ids")
        if (getattr(request, "n", None) or 1) != 1 or getattr(request, "stream", False):
            raise InvalidRequest("nvext", "is served for n = 1 without stream; use return_token_ids for others")
        request.return_token_ids = True

    def after(self, request: Any, answer: Any) -> None:
        """Add the token ids to the answer. An error of vLLM's stays as it is."""
        choices = getattr(answer, "choices", None)
        if getattr(request, "nvext", None) is not None and choices:
            answer.nvext = {TOKEN_IDS: choices[0].token_ids}
