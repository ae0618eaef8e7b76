"""`/tokenize` and `/detokenize` in vLLM's form: their bodies, the requests to the router, and the answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from inflight.gateway.bodies import MAX_PROMPT_VALUES, Body, ChatBody, TokenIds, read_fields, validated
from inflight.gateway.conversion import Defaults, convert_chat
from inflight.v1 import inference_pb2

# Parameters of a chat, which are checked as such.
_OF_CHATS = ("messages", "tools", "chat_template_kwargs")
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": (),
}


class TokenizeBody(Body):
    """`POST /tokenize`."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give exactly one of prompt and messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: is allowed only with prompt; the chat template writes special tokens")
        for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name) is not None:
                raise ValueError(f"{name}: is allowed only with messages")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[TokenIds, Field(max_length=MAX_PROMPT_VALUES)]


def parse_tokenize(raw: bytes) -> inference_pb2.TokenizeRequest:
    """Parses the body of `/tokenize`. Raises `ApiError`."""
    body = validated(TokenizeBody, read_fields(raw, UNSUPPORTED))
    request = inference_pb2.TokenizeRequest(
        model=body.model or "",
        want_token_names=body.return_token_strs,
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
    )
    if body.prompt is not None:
        request.text = body.prompt
        return request
    chat = {name: getattr(body, name) for name in _OF_CHATS}
    # Only the conversation is taken from it; a chat names a model.
    asked = convert_chat(validated(ChatBody, {"model": "any", **chat}), Defaults(max_choices=1), "")
    request.chat.CopyFrom(asked.requests[0].chat)
    return request


def parse_detokenize(raw: bytes) -> DetokenizeBody:
    """Parses the body of `/detokenize`. Raises `ApiError`."""
    return validated(DetokenizeBody, read_fields(raw, {}))


def tokenized(request: inference_pb2.TokenizeRequest, answer: inference_pb2.TokenizeResponse) -> dict[str, Any]:
    return {
        "count": len(answer.token_ids),
        "max_model_len": answer.context_length,
        "tokens": list(answer.token_ids),
        "token_strs": list(answer.token_names) if request.want_token_names else None,
    }
