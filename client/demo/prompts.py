"""What the demo asks: a dozen prompts whose answers differ in length by more than an order of magnitude.

Every fourth one is long, so that each static batch of four has one passenger for whom three wait. Where the length must
not differ between the runs, the end-of-sequence id is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

CHECKED_PROMPT = "What is the capital of France?"
CHECKED_WORD = "paris"


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A question, and the most tokens its answer may have: exactly as many where `ignore_eos` is set."""

    text: str
    max_tokens: int
    ignore_eos: bool = True


_REPORT = (
    "Summarise in one sentence: The ferry leaves the harbour at six in the morning and calls at four islands before "
    "noon. On market days it carries fish, bread and letters; in winter it carries almost nobody, and the captain "
    "talks to the gulls. Last spring the company wanted to close the line. The islanders bought the ship together, "
    "painted it green, and now it runs twice a day, at a small profit, with a school class on board on Thursdays."
)

DEMO_PROMPTS = (
    DemoPrompt(CHECKED_PROMPT, 24, ignore_eos=False),
    DemoPrompt("Tell me a long story about a lighthouse keeper and the sea.", 200),
    DemoPrompt("Say hello.", 8),
    DemoPrompt("Name three fruits.", 16),
    DemoPrompt("Explain step by step how a bicycle stays upright.", 180),
    DemoPrompt("What is two plus two?", 8),
    DemoPrompt(_REPORT, 40),
    DemoPrompt("Write a short poem about autumn.", 48),
    DemoPrompt("Describe a day in the life of a bus driver in detail.", 160),
    DemoPrompt("Name a colour.", 8),
    DemoPrompt("Translate 'good morning' into Spanish.", 16),
    DemoPrompt("How do I boil an egg?", 32),
)
