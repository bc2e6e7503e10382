"""Placeholders in answers are replaced, also if vLLM leaves one out; another form of log-probs is an error."""

import pytest

from darts_server.vllm.api.logprob_answers import _replace_placeholders

pytestmark = pytest.mark.anyio


async def test_each_placeholder_is_replaced_by_its_json() -> None:
    fragments = {"n1": (b'{"t":"n1"}', iter(["", "[1]"])), "n2": (b'{"t":"n2"}', iter(["", "", '["\u65e5"]']))}
    body = b'{"a":{"t":"n1"},"b":{"t":"n2"},"c":null}'
    assert await _replace_placeholders(body, fragments) == '{"a":[1],"b":["\u65e5"],"c":null}'.encode()


async def test_log_probs_that_vllm_leaves_out_stay_left_out() -> None:
    """As it does beside a hidden reasoning."""
    fragments = {"n1": (b'{"t":"n1"}', iter(["[1]"])), "n2": (b'{"t":"n2"}', iter(["[2]"]))}
    assert await _replace_placeholders(b'{"a":null,"b":{"t":"n2"}}', fragments) == b'{"a":null,"b":[2]}'


async def test_a_placeholder_in_another_form_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="another form"):
        await _replace_placeholders(b'{"a":{"t": "n1"}}', {"n1": (b'{"t":"n1"}', iter(["[1]"]))})
