"""What was said in a chat so far, and its form in a file: `{"messages": [{"role": …, "content": …}, …]}`.

The model's chat template, which the router applies, makes the prompt of it. What is not whole is not taken in: a
conversation that cannot be read leaves the present one as it was.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from inflight.requests import ChatMessage

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


class ConversationError(ValueError):
    """A file that holds no conversation, or cannot be read or written. The text is for the user."""


class Conversation:
    """The system message, if there is one, and the turns after it."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[ChatMessage] = []

    @property
    def messages(self) -> list[ChatMessage]:
        """All of it, as a request takes it."""
        beginning: list[ChatMessage] = [] if self.system is None else [{"role": SYSTEM, "content": self.system}]
        return [*beginning, *self.turns]

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.turns = []

    def asking(self, text: str) -> list[ChatMessage]:
        """The conversation with the user's next message, which is not taken in yet."""
        return [*self.messages, {"role": USER, "content": text}]

    def answered(self, text: str, answer: str) -> None:
        """Takes in a message of the user's and what came back, be it broken off."""
        self.turns = [*self.turns, {"role": USER, "content": text}, {"role": ASSISTANT, "content": answer}]

    def save(self, path: Path) -> None:
        """Writes it to a file that only this user can read."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConversationError(f"cannot write {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Goes on with the conversation in a file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConversationError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConversationError(f"{path} is not JSON: {error}") from None
        messages = content.get("messages") if isinstance(content, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ConversationError(f"{path} holds no conversation: an object with messages of role and content")
        has_system = bool(messages) and messages[0]["role"] == SYSTEM
        self.system = messages[0]["content"] if has_system else None
        self.turns = messages[1:] if has_system else messages


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )
