"""The part of an output in which stops apply: what is neither reasoning nor a marker or space around it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from inflight.router.tools.formats import AnswerFormat, ReasoningFormat
from inflight.router.tools.parser import AnswerParser, Content, Part


class StopScope:
    """Divides the text of one output. What it has returned after a text is a function of that text alone, however it
    was cut. Text that may be a marker is held back until that is known."""

    def __init__(self, reasoning: ReasoningFormat, *, in_reasoning: bool) -> None:
        self._parser = AnswerParser(AnswerFormat(None, reasoning, in_reasoning))
        self._held = ""
        # Where every part of the answer is a message of its own, reasoning may follow content.
        self._may_return = bool(reasoning.next_message)
        self._has_content = False

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields pieces of the text, each with whether stops apply to it."""
        for number, character in enumerate(text):
            if self._has_content and not self._may_return:
                yield text[number:], True
                return
            self._held += character
            # One character at a time: then at most the end of what is decided is content.
            yield from self._divided(self._parser.feed(character), self._parser.num_held)

    def finish(self) -> Iterator[tuple[str, bool]]:
        """Yields the pieces of the text that was held back, which has ended."""
        yield from self._divided(self._parser.finish(), 0)

    def contains(self, token: bytes) -> bool:
        """Returns whether stops apply to a token with these bytes that comes next. Spaces before the answer are not a
        part of it."""
        if self._parser.is_reasoning:
            return False
        return not token.isspace() or self._parser.is_in_content

    def _divided(self, parts: list[Part], num_held: int) -> Iterator[tuple[str, bool]]:
        content = "".join(part.text for part in parts if isinstance(part, Content))
        num_decided = len(self._held) - num_held
        num_outside = num_decided - len(content)
        if num_outside:
            yield self._held[:num_outside], False
        if content:
            self._has_content = True
            yield self._held[num_outside:num_decided], True
        self._held = self._held[num_decided:]
