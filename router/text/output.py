"""The text of one choice: its tokens, detokenized and cut at the first stop string.

Composes a detokenizer and a stop matcher. Never decides that a token ends the choice: the executor does. Invariants:
the texts of all steps together are the text of all tokens, cut at the first stop that counts; a token is taken once,
however often it is fed. To continue earlier output, feed that output first and drop its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.text.detokenizer import IncrementalDetokenizer
from router.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class TextStep:
    """Result of feeding tokens: text to send, how many of them were taken, and the stop string that ended the choice.

    `num_tokens` counts the tokens that were new, up to and including the one that completed the stop.
    """

    text: str
    num_tokens: int
    matched: str | None


class OutputText:
    """The text of a choice. Takes every token with its offset; `finish` ends it."""

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, include_stop=include_stop)
        self.has_stops = bool(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._matched: str | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens taken so far; the offset of the next one."""
        return self._num_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that ended the choice."""
        return self._matched

    def echo(self, prompt_ids: Sequence[int]) -> str:
        """Takes the next tokens of the prompt, before any output, and returns the text that they complete. Stop strings
        do not match in it."""
        assert not self._num_tokens, "the prompt comes before the output"
        return self._detokenizer.push(prompt_ids)

    def feed(self, offset: int, token_ids: Sequence[int], *, last_is_stop_token: bool = False) -> TextStep:
        """Takes the tokens `[offset, offset + len(token_ids))` and skips those that it has already.

        With `last_is_stop_token` the executor ended the choice with the last of them. Its text is left out, unless the
        stop is to be included.
        """
        if self._matched is not None:
            return TextStep("", 0, self._matched)
        assert offset <= self._num_tokens, f"token {self._num_tokens} is missing before {offset}"
        new_ids = list(token_ids[self._num_tokens - offset :])
        without_text = 1 if last_is_stop_token and new_ids and not self._include_stop else 0
        step = self._take(new_ids[: len(new_ids) - without_text])
        if self._matched is not None or not without_text:
            return step
        self._num_tokens += without_text
        return TextStep(step.text, step.num_tokens + without_text, None)

    def finish(self) -> TextStep:
        """Ends the choice and returns the text that was held back, cut at a stop string that it completes."""
        if self._matched is not None:
            return TextStep("", 0, self._matched)
        step = self._push_text(self._detokenizer.flush())
        return TextStep(step + self._stops.flush(), 0, self._matched)

    def _take(self, token_ids: list[int]) -> TextStep:
        if not self.has_stops:
            self._num_tokens += len(token_ids)
            return TextStep(self._detokenizer.push(token_ids), len(token_ids), None)
        texts: list[str] = []
        for num_taken, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            texts.append(self._push_text(self._detokenizer.push([token_id])))
            if self._matched is not None:
                return TextStep("".join(texts), num_taken, self._matched)
        return TextStep("".join(texts), len(token_ids), None)

    def _push_text(self, text: str) -> str:
        """Passes on the text that the newest token completed. A stop counts if that token has at least `min_tokens`
        before it, as in vLLM."""
        step = self._stops.push(text, may_stop=self._num_tokens > self._min_tokens)
        self._matched = step.matched
        return step.text
