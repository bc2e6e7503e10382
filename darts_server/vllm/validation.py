"""Validate a prompt as the engine will, before anything is started."""

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.vllm.prompt_request import PromptRequest

CHECKED_OPTIONS = ("lora_request", "data_parallel_rank")
"""Options of ``generate()`` that vLLM may refuse."""


def check_prompt(llm: AsyncLLM, request: PromptRequest) -> None:
    """Process the prompt once and drop the result.

    vLLM processes a prompt when it is added to the engine. For the second prompt of a request that is after the first
    one was started, and for a stream after the status was sent.

    Raises:
        vLLM's own exceptions, see :data:`darts_server.vllm.compat.engine.REFUSALS`.
    """
    prompt: Any = request.prompt
    is_rendered = isinstance(prompt, dict) and "type" in prompt
    if is_rendered:
        options = {name: request.options[name] for name in CHECKED_OPTIONS if name in request.options}
        llm.input_processor.process_inputs(request.request_id, prompt, request.params, llm._supported_tasks, **options)
