"""Search for stop strings in text that comes in pieces.

Holds back the text that may still be the beginning of a stop string: the longest suffix that is a proper prefix of some
stop, and nothing more. Never sends a part of a match or what follows it. Works on characters, in time linear in the
text, whatever the number of stops (Aho-Corasick).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A transition's key is `state * NUM_CODE_POINTS + code point`: one flat dict costs a third of a dict per state.
NUM_CODE_POINTS = 0x110000


@dataclass(frozen=True, slots=True)
class StopStep:
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
    """Searches for the stops of one choice. The match that ends first wins; of those that end together, the longest."""

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
