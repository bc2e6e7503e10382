"""vLLM's tool parser for the tiny policy: every answer that has tokens calls the calculator with its own text.

The server gets the file as `--tool-parser-plugin`, and `every-answer` as `--tool-call-parser`.
"""

import json
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

NAME = "every-answer"


@ToolParserManager.register_module(NAME)
class EveryAnswer(ToolParser):
    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        if not model_output:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        function = FunctionCall(name=tool_name(request), arguments=json.dumps({"text": model_output}))
        return ExtractedToolCallInformation(
            tools_called=True,
            tool_calls=[ToolCall(function=function)],
            content=model_output,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        # The call is complete with the first token, so that the harness runs the tool however the stream ends.
        if previous_text or not delta_text:
            return DeltaMessage(content=delta_text)
        self.current_tool_id = 0
        self.current_tool_name_sent = True
        arguments = json.dumps({"text": delta_text})
        self.prev_tool_call_arr = [{"name": tool_name(request), "arguments": arguments}]
        self.streamed_args_for_tool = [arguments]
        function = DeltaFunctionCall(name=tool_name(request), arguments=arguments)
        call = DeltaToolCall(index=0, id="call-0", type="function", function=function)
        return DeltaMessage(content=delta_text, tool_calls=[call])


def tool_name(request: Any) -> str:
    """Return the name of the request's first tool: harnesses add prefixes to the names of their tools."""
    return str(request.tools[0].function.name)
