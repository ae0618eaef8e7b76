"""The parts of an output as clients get them, and the number of its tokens that are reasoning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from inflight.v1 import inference_pb2
from router.tools.parser import AnswerParser, Arguments, CallBegins, CallEnds, Content, Part, Reasoning, merged


def wire_parts(parts: Iterable[Part], call_id: Callable[[int], str]) -> Iterator[inference_pb2.OutputPart]:
    """Yields the parts as messages, neighbours of one kind as one. A call has its id in the first one."""
    for part in merged(parts):
        match part:
            case Reasoning(text):
                yield inference_pb2.OutputPart(reasoning=text)
            case Content(text):
                yield inference_pb2.OutputPart(content=text)
            case CallBegins(index, name):
                call = inference_pb2.ToolCallPart(index=index, id=call_id(index), name=name)
                yield inference_pb2.OutputPart(tool_call=call)
            case Arguments(index, text):
                yield inference_pb2.OutputPart(tool_call=inference_pb2.ToolCallPart(index=index, arguments=text))
            case CallEnds():
                pass  # the next part, or the end of the choice, shows it


class ReasoningCount:
    """The number of an output's first tokens that are reasoning, its tags included. Until it `is_over`, the output's
    parser takes the tokens one by one."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._has_begun = False
        self._num_taken = 0
        self.is_over = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return self._num_taken if self._has_begun else 0

    def take(self, num_tokens: int) -> None:
        """Counts a token whose text the parser has."""
        self._num_taken += num_tokens
        if self._parser.is_reasoning:
            self._has_begun = True
        elif self._has_begun or not self._parser.may_reason:
            self.is_over = True
