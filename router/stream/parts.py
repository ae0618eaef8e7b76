"""The parts of an output as messages for clients, and the count of its reasoning tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from inflight.router.tools.parser import AnswerParser, Arguments, CallBegins, CallEnds, Content, Part, Reasoning, merged
from inflight.v1 import inference_pb2


def wire_parts(parts: Iterable[Part], call_id: Callable[[int], str]) -> Iterator[inference_pb2.OutputPart]:
    """Yields the parts as messages. Adjacent parts of one kind are merged. The first message of a tool call has its
    id."""
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
                pass  # the client recognizes it by the next part or the end of the choice


class ReasoningCount:
    """Counts the tokens of an output from its beginning to the end of its reasoning, including the tags. Until
    `is_over`, the output must be parsed one token at a time."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._has_begun = False
        self._num_taken = 0
        self.is_over = False

    @property
    def num_tokens(self) -> int:
        """The number of reasoning tokens so far."""
        return self._num_taken if self._has_begun else 0

    def take(self, num_tokens: int) -> None:
        """Counts tokens whose text the parser has already taken."""
        self._num_taken += num_tokens
        if self._parser.is_reasoning:
            self._has_begun = True
        elif self._has_begun or not self._parser.may_reason:
            self.is_over = True
