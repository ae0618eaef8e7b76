"""The roles that a chat template supports, found by rendering: templates do not list them.

A role is supported if a conversation with it can be rendered and the result contains its message. For templates that
accept any role, the usual roles count, and those that the template compares roles with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from inflight.common.errors import FieldViolation
from inflight.v1 import inference_pb2

Messages = list[dict[str, Any]]

USUAL_ROLES = ("assistant", "developer", "system", "tool", "user")
PROBE = "inflightprobetext"
MAX_QUOTED_CHARACTERS = 40

_COMPARED = re.compile(r"""\brole\b['"\])\s]*(?:==|!=)\s*(['"])([\w.-]+)\1""")
_SELECTED = re.compile(r"""selectattr\(\s*(['"])role\1\s*,\s*(['"])(?:eq|equalto|==)\2\s*,\s*(['"])([\w.-]+)\3""")
_LISTED = re.compile(r"""\brole\b['"\])\s]*(?:not\s+)?in\s*[\[(]([^\])]*)[\])]""")
_QUOTED = re.compile(r"""(['"])([\w.-]+)\1""")


def supported_roles(render: Callable[[Messages], str], templates: list[str]) -> tuple[str, ...]:
    """Returns the supported roles in order of name; the usual ones if none can be tried. `render` may raise any
    exception."""
    candidates = sorted({*USUAL_ROLES, *(role for template in templates for role in roles_asked_for(template))})
    return tuple(role for role in candidates if is_supported(render, role)) or USUAL_ROLES


def roles_asked_for(template: str) -> Iterator[str]:
    """Yields the roles that a template compares with."""
    for found in _COMPARED.finditer(template):
        yield found[2]
    for found in _SELECTED.finditer(template):
        yield found[4]
    for found in _LISTED.finditer(template):
        yield from (role[2] for role in _QUOTED.finditer(found[1]))


def is_supported(render: Callable[[Messages], str], role: str) -> bool:
    """Returns whether a message of this role gets into the prompt, in a position where the template accepts one."""
    return any(PROBE in (_rendered(render, messages) or "") for messages in _conversations(role))


def written_prompts(render: Callable[[Messages], str]) -> list[str]:
    """Returns prompts of plain conversations, to find what the template writes around messages."""
    spoken = [[_said("user")], [_said("user"), _said("assistant")], [_said("system"), _said("user")]]
    return [prompt for messages in spoken if (prompt := _rendered(render, messages)) is not None]


def role_violations(chat: inference_pb2.Chat, roles: tuple[str, ...], field: str) -> Iterator[FieldViolation]:
    """Yields the messages whose role is none of these. A message without a role is another violation."""
    for i, message in enumerate(chat.messages):
        if message.role and message.role not in roles:
            role = message.role[:MAX_QUOTED_CHARACTERS]
            yield FieldViolation(f"{field}.messages[{i}].role", f"is {role!r}; must be one of {', '.join(roles)}")


def _conversations(role: str) -> Iterator[Messages]:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    probe = {"role": role, "content": PROBE, "name": "f", "tool_call_id": "call00001"}
    yield [probe]
    yield [{"role": role, "content": PROBE}]
    yield [{"role": "user", "content": "hello"}, probe]
    yield [probe, {"role": "user", "content": "hello"}]
    yield [{"role": "user", "content": "hello"}, called, probe]


def _said(role: str) -> dict[str, Any]:
    return {"role": role, "content": PROBE}


def _rendered(render: Callable[[Messages], str], messages: Messages) -> str | None:
    try:
        return render(messages)
    except Exception:
        return None  # a template is a program: it can raise anything
