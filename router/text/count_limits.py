"""Limits on the entries of a request's repeated fields.

The limits are far above what clients send. They bound the work that a request causes before anything is known about it.
`inflight.common.rpc.wire_counts` applies them to its bytes before these are parsed, and
`inflight.router.request.validation` to the parsed message.
"""

from __future__ import annotations

from inflight.common.rpc.wire_counts import WireLimits

MAX_MESSAGES = 4096
# All messages of a conversation together.
MAX_CONTENT_PARTS = 8192
MAX_TOOL_CALLS = 4096
MAX_TOOLS = 512
# Each of `tools`, the parameters of `functions`, `template_kwargs` and the arguments of all tool calls together: the
# objects, lists, strings, numbers, booleans and nulls within them.
MAX_VALUES = 10_000

# Ids of a prompt or of the output that a client brings; more than any model's context.
MAX_TOKEN_IDS = 2**20

# Violations that an error names. The walk over a request ends there.
MAX_VIOLATIONS = 100

REQUEST_WIRE_LIMITS = WireLimits(
    max_of={
        "inflight.v1.Chat.messages": MAX_MESSAGES,
        "inflight.v1.ChatMessage.content": MAX_CONTENT_PARTS,
        "inflight.v1.ChatMessage.tool_calls": MAX_TOOL_CALLS,
        "inflight.v1.Chat.tools": MAX_TOOLS,
        "inflight.v1.Chat.functions": MAX_TOOLS,
        "inflight.v1.ToolChoice.names": MAX_TOOLS,
        "google.protobuf.Struct.fields": 2 * MAX_VALUES,
        "google.protobuf.ListValue.values": 2 * MAX_VALUES,
    }
)
