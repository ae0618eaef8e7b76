"""The messages of a chat and their file format: `{"messages": [{"role": …, "content": …}, …]}`.

The router applies the model's chat template. A file that cannot be read leaves the conversation unchanged.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from inflight.requests import ChatMessage

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


class ConversationError(ValueError):
    """A file without a conversation, or one that cannot be read or written. The text is for the user."""


class Conversation:
    """The system message, if there is one, and the turns after it."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[ChatMessage] = []

    @property
    def messages(self) -> list[ChatMessage]:
        """All messages, as a request takes them."""
        beginning: list[ChatMessage] = [] if self.system is None else [{"role": SYSTEM, "content": self.system}]
        return [*beginning, *self.turns]

    def reset(self) -> None:
        """Removes all messages but the system message."""
        self.turns = []

    def asking(self, text: str) -> list[ChatMessage]:
        """Returns the conversation with the user's next message, which is not added yet."""
        return [*self.messages, {"role": USER, "content": text}]

    def answered(self, text: str, answer: str) -> None:
        """Adds a user message and its answer, which may be partial."""
        self.turns = [*self.turns, {"role": USER, "content": text}, {"role": ASSISTANT, "content": answer}]

    def save(self, path: Path) -> None:
        """Writes the conversation to a file that only this user can read."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConversationError(f"cannot write {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replaces the conversation by the one in a file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConversationError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConversationError(f"{path} is not JSON: {error}") from None
        messages = content.get("messages") if isinstance(content, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ConversationError(
                f"{path} holds no conversation: expected an object with messages of role and content"
            )
        has_system = bool(messages) and messages[0]["role"] == SYSTEM
        self.system = messages[0]["content"] if has_system else None
        self.turns = messages[1:] if has_system else messages


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )
