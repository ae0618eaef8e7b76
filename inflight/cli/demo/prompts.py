"""Prompts of the demo: a dozen whose answers differ in length by more than an order of magnitude.

Any four consecutive prompts include a long one, so that every static batch of four waits for a long request, even if
the first request is a batch of its own. Most prompts ignore the end-of-sequence id, so that both runs have the same
lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.requests import ChatMessage

CHECKED_PROMPT = "What is the capital of France?"
CHECKED_WORD = "paris"

# Without it the default model's first token is nearly a tie ("The" against "L", 0.08 logits apart in float32), which
# rounding in bfloat16 decides either way; with it the smallest gap up to "Paris" is 1.9.
CHECKED_SYSTEM = "You answer questions in one sentence."


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A question and the maximum length of its answer, which is the exact length with `ignore_eos`."""

    text: str
    max_tokens: int
    ignore_eos: bool = True
    system: str | None = None

    @property
    def chat(self) -> list[ChatMessage]:
        """The conversation to send."""
        system: list[ChatMessage] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.text}]


_REPORT = (
    "Summarise in one sentence: The ferry leaves the harbour at six in the morning and calls at four islands before "
    "noon. On market days it carries fish, bread and letters; in winter it carries almost no one, and the captain "
    "talks to the gulls. Last spring the company wanted to close the line. The islanders bought the ship together, "
    "painted it green, and now it runs twice a day, at a small profit, with a school class on board on Thursdays."
)

DEMO_PROMPTS = (
    DemoPrompt(CHECKED_PROMPT, 24, ignore_eos=False, system=CHECKED_SYSTEM),
    DemoPrompt("Tell me a long story about a lighthouse keeper and the sea.", 200),
    DemoPrompt("Say hello.", 8),
    DemoPrompt("Name three fruits.", 16),
    DemoPrompt("What is two plus two?", 8),
    DemoPrompt("Explain step by step how a bicycle stays upright.", 180),
    DemoPrompt(_REPORT, 40),
    DemoPrompt("Write a short poem about autumn.", 48),
    DemoPrompt("Name a colour.", 8),
    DemoPrompt("Describe a day in the life of a bus driver in detail.", 160),
    DemoPrompt("Translate 'good morning' into Spanish.", 16),
    DemoPrompt("How do I boil an egg?", 32),
)
