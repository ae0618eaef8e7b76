"""Entries of `/v1/models` as Codex reads them, which sends its version with the request. Pure."""

from __future__ import annotations

from typing import Any

# Codex gives a model without instructions none at all.
INSTRUCTIONS = (
    "You are a coding agent that runs in a terminal, in the folder of a user's project. Work on the user's request "
    "until it is done, with the tools that you have: look before you change something, change files with apply_patch, "
    "keep changes small and in the style of the project, and check them by its tests where there are any. Do what the "
    "project's AGENTS.md says. Do not undo changes that are not yours. When you are done, say in a few sentences what "
    "you did and what you could not do."
)
# Of the output of one tool call.
MAX_OUTPUT_TOKENS = 10_000


def codex_model(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry for one of the list in OpenAI's form."""
    return {
        "slug": entry["id"],
        "display_name": entry["id"],
        "description": None,
        "context_window": entry.get("max_model_len") or None,
        "input_modalities": ["text"],
        "base_instructions": INSTRUCTIONS,
        "apply_patch_tool_type": "freeform",
        "shell_type": "default",
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "truncation_policy": {"mode": "tokens", "limit": MAX_OUTPUT_TOKENS},
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
    }
