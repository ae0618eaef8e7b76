"""The text of one choice: its tokens, detokenized and cut at the first stop.

`OutputText` composes a detokenizer, a `StopMatcher` and, for an output with reasoning, a `StopScope`. Executors find
stop tokens, which know no text; only those that do not apply to reasoning are found here. Invariants: the texts of all
steps together are the text of all tokens, cut at the first stop that counts; a token is taken once, however often it is
fed. To continue earlier output, feed that output first and drop its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from inflight.router.text.detokenizer import IncrementalDetokenizer
from inflight.router.text.stop_scope import StopScope

# A transition's key is `state * NUM_CODE_POINTS + code point`: one flat dict costs a third of a dict per state.
NUM_CODE_POINTS = 0x110000
NO_STOP_TOKENS: Mapping[int, bytes] = MappingProxyType({})


class TextStep(NamedTuple):
    """Result of feeding tokens: text to send, how many of them were taken, and the stop string, or the id of the stop
    token, that ended the choice.

    `num_tokens` counts the tokens that were new, up to and including the one that completed the stop.
    """

    text: str
    num_tokens: int
    matched: str | int | None


class OutputText:
    """The text of a choice. Takes every token with its offset; `finish` ends it.

    `stop_tokens` has the bytes of each stop token that is found here. Stops apply within `scope`; None: everywhere.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_tokens: Mapping[int, bytes] = NO_STOP_TOKENS,
        scope: StopScope | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, include_stop=include_stop)
        self._stop_tokens = stop_tokens
        self.has_stops = bool(stops or stop_tokens)
        self._scope = scope if self.has_stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._matched: str | int | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens taken so far; the offset of the next one."""
        return self._num_tokens

    @property
    def matched(self) -> str | int | None:
        """The stop string, or the id of the stop token, that ended the choice."""
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
        text = self._push_text(self._detokenizer.flush())
        if self._scope is not None and self._matched is None:
            text += self._match(self._scope.finish())
        return TextStep(text + self._stops.flush(), 0, self._matched)

    def _take(self, token_ids: list[int]) -> TextStep:
        if not self.has_stops:
            self._num_tokens += len(token_ids)
            return TextStep(self._detokenizer.push(token_ids), len(token_ids), None)
        texts: list[str] = []
        for num_taken, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            if self._ends_with(token_id):
                return TextStep("".join([*texts, self._end_with(token_id)]), num_taken, self._matched)
            texts.append(self._push_text(self._detokenizer.push([token_id])))
            if self._matched is not None:
                return TextStep("".join(texts), num_taken, self._matched)
        return TextStep("".join(texts), len(token_ids), None)

    def _ends_with(self, token_id: int) -> bool:
        """Returns whether the newest token is a stop token that counts."""
        text = self._stop_tokens.get(token_id)
        if text is None or self._num_tokens <= self._min_tokens:
            return False
        return self._scope is None or self._scope.contains(text)

    def _end_with(self, token_id: int) -> str:
        """Ends the choice at a stop token, unless a stop string ends before it. Returns the text that is left."""
        text = self._push_text(self._detokenizer.push([token_id])) if self._include_stop else ""
        if self._matched is None:
            text += self.finish().text
        if self._matched is None:
            self._matched = token_id
        return text

    def _push_text(self, text: str) -> str:
        """Passes on the text that the newest token completed."""
        return self._match([(text, True)] if self._scope is None else self._scope.push(text))

    def _match(self, pieces: Iterable[tuple[str, bool]]) -> str:
        """Passes on text, with the pieces in which stops apply cut at one. A stop counts if the newest token has at
        least `min_tokens` before it, as in vLLM."""
        sent: list[str] = []
        for text, has_stops in pieces:
            if not has_stops:
                sent.append(self._stops.flush() + text)
                continue
            step = self._stops.push(text, may_stop=self._num_tokens > self._min_tokens)
            sent.append(step.text)
            if step.matched is not None:
                self._matched = step.matched
                break
        return "".join(sent)


class StopStep(NamedTuple):
    """Text that can be sent, and the stop string that ended it."""

    text: str
    matched: str | None


@dataclass(frozen=True, slots=True)
class _Automaton:
    """An automaton whose states are prefixes of stops, numbered from 0, the empty one.

    `transitions` extend a prefix by a character. `fallbacks[s]` is the longest proper suffix of s that is a state.
    `matches[s]` is the index of the longest stop that s ends with. `num_held[s]` is the length of the longest suffix of
    s that is a proper prefix of some stop.
    """

    transitions: dict[int, int]
    fallbacks: list[int]
    matches: list[int | None]
    num_held: list[int]


def _build(stops: Sequence[str]) -> _Automaton:
    transitions: dict[int, int] = {}
    matches: list[int | None] = [None]
    # Per depth: a state, the state before its last character, and that character.
    levels: list[list[tuple[int, int, int]]] = []
    for index, stop in enumerate(stops):
        state = 0
        for depth, character in enumerate(stop):
            code = ord(character)
            key = state * NUM_CODE_POINTS + code
            following = transitions.get(key)
            if following is None:
                following = transitions[key] = len(matches)
                matches.append(None)
                if depth == len(levels):
                    levels.append([])
                levels[depth].append((following, state, code))
            state = following
        matches[state] = index
    return _link(transitions, matches, levels)


def _link(
    transitions: dict[int, int], matches: list[int | None], levels: list[list[tuple[int, int, int]]]
) -> _Automaton:
    """Fills in what a state takes from its suffixes, shorter states first."""
    fallbacks = [0] * len(matches)
    num_held = [0] * len(matches)
    has_longer = {before for level in levels for _, before, _ in level}
    for depth, level in enumerate(levels, start=1):
        for state, before, code in level:
            suffix = fallbacks[before]
            while suffix and suffix * NUM_CODE_POINTS + code not in transitions:
                suffix = fallbacks[suffix]
            fallback = 0 if before == 0 else transitions.get(suffix * NUM_CODE_POINTS + code, 0)
            fallbacks[state] = fallback
            if matches[state] is None:
                matches[state] = matches[fallback]
            num_held[state] = depth if state in has_longer else num_held[fallback]
    return _Automaton(transitions, fallbacks, matches, num_held)


class StopMatcher:
    """Searches for the stops of one choice in text that comes in pieces. The match that ends first wins; of those that
    end together, the longest.

    Holds back the text that may still be the beginning of a stop string: the longest suffix that is a proper prefix of
    some stop, and nothing more. Never sends a part of a match or what follows it. Works on characters, in time linear
    in the text, whatever the number of stops (Aho-Corasick).
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string"
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._automaton = _build(self._stops)
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> StopStep:
        """Takes text and returns what can be sent. With `may_stop` False a match that ends in this text does not count.

        Accepts no text after a match.
        """
        if self._matched is not None:
            return StopStep("", self._matched)
        if not self._stops:
            return StopStep(text, None)
        text_with_held = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            match = self._advance(ord(character))
            if match is not None and may_stop:
                matched = self._matched = self._stops[match]
                self._held = ""
                return StopStep(text_with_held[: end if self._include_stop else end - len(matched)], matched)
        # If the match itself is sent, so is its beginning: there is nothing to hold back.
        num_held = 0 if self._include_stop else self._automaton.num_held[self._state]
        num_sent = len(text_with_held) - num_held
        self._held = text_with_held[num_sent:]
        return StopStep(text_with_held[:num_sent], None)

    def flush(self) -> str:
        """Returns what was held back: the text ended without becoming a stop."""
        text, self._held = self._held, ""
        self._state = 0
        return text

    def _advance(self, code: int) -> int | None:
        """Moves on by a character and returns the index of the stop that ends with it."""
        automaton, state = self._automaton, self._state
        following = automaton.transitions.get(state * NUM_CODE_POINTS + code)
        while following is None and state:
            state = automaton.fallbacks[state]
            following = automaton.transitions.get(state * NUM_CODE_POINTS + code)
        self._state = following or 0
        return automaton.matches[self._state]
