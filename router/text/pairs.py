"""The prompt of which a reranking model makes a score, as a conversation for the model's chat template.

A template that compares roles with `query` and `document` gets both as messages, as sentence-transformers writes them.
Other templates get the conversation that Qwen3-Reranker was trained with, and its answer would be yes or no.
"""

from __future__ import annotations

from collections.abc import Collection

from inflight.v1 import inference_pb2

QUERY, DOCUMENT = "query", "document"
# Qwen3-Reranker's model card.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def pair_chat(pair: inference_pb2.TextPair, roles: Collection[str]) -> inference_pb2.Chat:
    """Returns the conversation. `roles` are those that the template supports."""
    if QUERY in roles and DOCUMENT in roles:
        said = [("system", pair.instruction)] if pair.instruction else []
        said += [(QUERY, pair.query), (DOCUMENT, pair.document)]
        return _chat(said)
    text = f"<Instruct>: {pair.instruction or INSTRUCTION}\n<Query>: {pair.query}\n<Document>: {pair.document}"
    chat = _chat([("system", SYSTEM), ("user", text)])
    # The template then writes that nothing was thought, and the answer follows.
    chat.template_kwargs["enable_thinking"] = False
    return chat


def _chat(said: list[tuple[str, str]]) -> inference_pb2.Chat:
    messages = [
        inference_pb2.ChatMessage(role=role, content=[inference_pb2.ContentPart(text=text)]) for role, text in said
    ]
    return inference_pb2.Chat(messages=messages)
