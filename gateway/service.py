"""The gateway's routes, from an HTTP request to an answer. Errors are `ApiError`s."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from inflight import AsyncClient
from inflight.common.version import installed_version
from inflight.errors import InflightError
from inflight.gateway.answers import Chunks, Form, OwnForm, encoded, model_objects
from inflight.gateway.batches.batches import Batches
from inflight.gateway.bodies import parse_chat, parse_completion
from inflight.gateway.choices import Source, whole_of
from inflight.gateway.conversion import ApiRequest, Defaults, convert_chat, convert_completion, defaults_of
from inflight.gateway.disconnects import ClientGone, while_connected
from inflight.gateway.embeddings.calls import EmbedCall, parse_embeddings, parse_rerank, parse_score
from inflight.gateway.errors import ApiError, from_router, refused
from inflight.gateway.event_ids import HEADER as LAST_EVENT_ID
from inflight.gateway.event_ids import AnswerId, Place, read_event_id
from inflight.gateway.exchange import UNUSED
from inflight.gateway.messages.bodies import chat_of, parse_count_tokens, parse_messages
from inflight.gateway.messages.form import MessageForm
from inflight.gateway.metrics import Metrics
from inflight.gateway.responses.bodies import parse_responses
from inflight.gateway.responses.codex import codex_model
from inflight.gateway.responses.stored import StoredResponses, converted
from inflight.gateway.settings import GatewaySettings
from inflight.gateway.streaming import ChoiceSource, EventStream, WriteTimeouts
from inflight.gateway.tokens.tokenize import parse_detokenize, parse_tokenize, tokenized
from inflight.v1 import inference_pb2

log = logging.getLogger(__name__)

KEY_HEADER = "Idempotency-Key"
READY_TIMEOUT_S = 2.0
# Long enough for JSON web tokens; the router accepts 16 KiB of metadata in all.
MAX_AUTHORIZATION_CHARACTERS = 12 * 1024
PASSED_ON = {
    "traceparent": re.compile(r"[0-9a-f-]{1,128}"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}
_INDEX = re.compile(r"\[\d+\]")
_KEY = re.compile(r"[!-~]{1,1024}")

Keep = Callable[[], Awaitable[bool]]
Convert = Callable[[bytes, str], tuple[ApiRequest, Form]]


class GatewayService:
    """The routes. Stateless except for running requests, which `app` counts."""

    def __init__(
        self,
        client: AsyncClient,
        settings: GatewaySettings,
        metrics: Metrics,
        stored: StoredResponses | None = None,
        batches: Batches | None = None,
    ) -> None:
        """`stored` are the stored responses, if this gateway has a store, `batches` its files and batches."""
        self._stored = stored
        self._batches = batches
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._began = int(time.time())
        self._reported: set[str] = set()
        self._defaults = defaults_of(settings)
        self._timeouts = WriteTimeouts(settings.heartbeat_s, settings.write_timeout_s)

    async def chat(self, request: Request) -> ASGIApp:
        """`POST /v1/chat/completions`."""
        return await self._complete(
            request, lambda raw, key: (convert_chat(parse_chat(raw), self._defaults, key), OwnForm())
        )

    async def completion(self, request: Request) -> ASGIApp:
        """`POST /v1/completions`."""
        return await self._complete(
            request, lambda raw, key: (convert_completion(parse_completion(raw), self._defaults, key), OwnForm())
        )

    async def responses(self, request: Request) -> ASGIApp:
        """`POST /v1/responses`."""
        if LAST_EVENT_ID in request.headers:
            raise refused(LAST_EVENT_ID, "is not supported here: a response cannot be resumed; send a chat completion")
        stored, metadata, key = self._stored, _metadata(request), _key(request)
        raw = await self._body(request)
        if stored is None:
            body = parse_responses(raw)
        else:
            raw = await stored.resolved(raw, metadata)
            body = stored.parsed(raw)
        earlier = None
        if stored is not None and body.previous_response_id is not None:
            earlier = await stored.earlier(body.previous_response_id, metadata)
            body = body.after(earlier.items)
        self._report_unused(request, body.unused)
        api_request, form = converted(body, self._defaults, key)
        if stored is None or not body.stores:
            return await self._answer(request, api_request, form)
        if body.background:
            if key:
                raise refused(KEY_HEADER, "is not supported with background")
            return _shown(await stored.begin(raw, body, earlier, metadata))

        async def keep() -> bool:
            form.is_stored = await stored.keep(raw, form.response(), earlier, metadata)
            return form.is_stored

        return await self._answer(request, api_request, form, keep)

    @property
    def stores_responses(self) -> bool:
        """Whether this gateway has a store of responses."""
        return self._stored is not None

    async def stored_response(self, request: Request) -> ASGIApp:
        """`GET` and `DELETE /v1/responses/{id}`."""
        assert self._stored is not None
        response_id, metadata = request.path_params["response_id"], _metadata(request)
        if request.method == "DELETE":
            return _shown(await self._stored.delete(response_id, metadata))
        return _shown(await self._stored.retrieve(response_id, metadata, request.query_params))

    async def cancel_response(self, request: Request) -> ASGIApp:
        """`POST /v1/responses/{id}/cancel`."""
        assert self._stored is not None
        return _shown(await self._stored.cancel(request.path_params["response_id"], _metadata(request)))

    async def input_items(self, request: Request) -> ASGIApp:
        """`GET /v1/responses/{id}/input_items`."""
        assert self._stored is not None
        response_id = request.path_params["response_id"]
        return _shown(await self._stored.input_items(response_id, _metadata(request), request.query_params))

    @property
    def has_files(self) -> bool:
        """Whether this gateway has files and batches."""
        return self._batches is not None

    async def files(self, request: Request) -> ASGIApp:
        """`GET` and `POST /v1/files`."""
        assert self._batches is not None
        files, metadata = self._batches.files, _metadata(request)
        if request.method == "POST":
            content_type = request.headers.get("content-type", "")
            return _shown(await files.upload(content_type, self._parts(request), metadata))
        return _shown(await files.page(request.query_params, metadata))

    async def file(self, request: Request) -> ASGIApp:
        """`GET` and `DELETE /v1/files/{id}`."""
        assert self._batches is not None
        files, file_id, metadata = self._batches.files, request.path_params["file_id"], _metadata(request)
        return _shown(await (files.delete if request.method == "DELETE" else files.retrieve)(file_id, metadata))

    async def file_content(self, request: Request) -> ASGIApp:
        """`GET /v1/files/{id}/content`."""
        assert self._batches is not None
        num_bytes, content = await self._batches.files.content(request.path_params["file_id"], _metadata(request))
        headers = {"content-length": str(num_bytes)}
        return StreamingResponse(content, headers=headers, media_type="application/octet-stream")

    async def batches(self, request: Request) -> ASGIApp:
        """`GET` and `POST /v1/batches`."""
        assert self._batches is not None
        metadata = _metadata(request)
        if request.method == "POST":
            return _shown(await self._batches.create(await self._body(request), metadata, _key(request)))
        return _shown(await self._batches.page(request.query_params, metadata))

    async def batch(self, request: Request) -> ASGIApp:
        """`GET /v1/batches/{id}`."""
        assert self._batches is not None
        return _shown(await self._batches.retrieve(request.path_params["batch_id"], _metadata(request)))

    async def cancel_batch(self, request: Request) -> ASGIApp:
        """`POST /v1/batches/{id}/cancel`."""
        assert self._batches is not None
        return _shown(await self._batches.cancel(request.path_params["batch_id"], _metadata(request)))

    async def messages(self, request: Request) -> ASGIApp:
        """`POST /v1/messages`, Anthropic's API."""
        return await self._complete(request, lambda raw, key: self._convert_message(request, raw, key))

    def _convert_message(self, request: Request, raw: bytes, key: str) -> tuple[ApiRequest, Form]:
        body = parse_messages(raw)
        converted = chat_of(body)
        self._report_unused(request, converted.unused)
        form = MessageForm(body, converted)
        try:
            return convert_chat(converted.chat, self._defaults, key), form
        except ApiError as error:
            raise form.refusal(error) from None

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`."""
        metadata = _metadata(request)
        converted = chat_of(parse_count_tokens(await self._body(request)))
        self._report_unused(request, converted.unused)
        api_request = convert_chat(converted.chat, self._defaults, "")
        chat = api_request.requests[0]
        asked = inference_pb2.TokenizeRequest(model=chat.model, chat=chat.chat)
        try:
            answer = await while_connected(request.receive, self._client.send_tokenize(asked, metadata=metadata))
        except InflightError as error:
            raise converted.restored(from_router(error, "messages", num_joined=api_request.num_joined)) from None
        return _json(encoded({"input_tokens": len(answer.token_ids)}))

    def _report_unused(self, request: Request, hints: Sequence[str]) -> None:
        """Names parameters without effect in a header of the answer, and each once in the log."""
        if hints:
            setattr(request.state, UNUSED, ", ".join(hints))
        for name in hints:
            hint = _INDEX.sub("", name)
            if hint not in self._reported:
                self._reported.add(hint)
                log.info("%s: %s has no effect", request.url.path, hint)

    async def _complete(self, request: Request, convert: Convert) -> ASGIApp:
        _metadata(request)  # refused before the body is read
        return await self._answer(request, *convert(await self._body(request), _key(request)))

    async def _answer(self, request: Request, api_request: ApiRequest, form: Form, keep: Keep | None = None) -> ASGIApp:
        """Answers a request. `keep` is called before its end is sent."""
        source = Source(self._client, _metadata(request), self._metrics)
        last_id = request.headers.get(LAST_EVENT_ID)
        if last_id is not None:
            return self._resume(api_request, form, last_id, source)
        answer = AnswerId(
            f"{'chatcmpl' if api_request.kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}", int(time.time())
        )
        if not api_request.is_stream:
            return await self._whole(request, api_request, form, answer, source, keep)
        sources = [
            ChoiceSource(number * api_request.n, api_request.n, source.begun(one, takes_back=False))
            for number, one in enumerate(api_request.requests)
        ]
        places = [Place() for _ in range(api_request.num_choices)]
        return EventStream(Chunks(api_request, answer), form, sources, places, self._timeouts, self._metrics, keep)

    async def _whole(
        self,
        request: Request,
        api_request: ApiRequest,
        form: Form,
        answer: AnswerId,
        source: Source,
        keep: Keep | None,
    ) -> Response:
        try:
            collected = await while_connected(request.receive, source.collected(api_request))
        except InflightError as error:
            raise form.refusal(
                from_router(error, api_request.prompt_param, api_request.renamed, api_request.num_joined)
            ) from None
        accepted = collected[0].accepted  # only a chat has tools, and it is one prompt
        if accepted is not None and (ignored := accepted.ignored_schema_words):
            unused = getattr(request.state, UNUSED, "")
            setattr(request.state, UNUSED, ", ".join(filter(None, [unused, *ignored])))

        def body() -> bytes:
            return encoded(form.whole(whole_of(api_request, answer, collected)))

        if keep is not None:
            shown = form.whole(whole_of(api_request, answer, collected))
            return _json(encoded(shown | {"store": await keep()}))
        if not api_request.scores_prompts:
            return _json(body())
        # Its log probabilities may be as many as the tokens of many prompts: streams go on meanwhile.
        return _json(await asyncio.to_thread(body))

    def _resume(self, api_request: ApiRequest, form: Form, last_id: str, source: Source) -> EventStream:
        """Resumes after an event of an earlier answer, of any gateway. The body must be the same."""
        answer, places = read_event_id(form.resume(last_id))
        if not api_request.is_stream:
            raise refused("stream", f"must be true with {LAST_EVENT_ID}")
        if len(places) != api_request.num_choices:
            text = f"is of an answer with {len(places)} choices, but this body requests {api_request.num_choices}"
            raise refused(LAST_EVENT_ID, text)
        prompts = [places[first : first + api_request.n] for first in range(0, len(places), api_request.n)]
        if any(place.request_id != prompt[0].request_id for prompt in prompts for place in prompt):
            raise refused(LAST_EVENT_ID, "is of a gateway of an earlier version; send the request again")
        sources = [
            ChoiceSource(number * api_request.n, api_request.n, source.resumed(prompt))
            for number, prompt in enumerate(prompts)
        ]
        return EventStream(Chunks(api_request, answer), form, sources, places, self._timeouts, self._metrics)

    async def _body(self, request: Request) -> bytes:
        limit = self._settings.max_body_bytes
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for part in self._parts(request):
                    num_bytes += len(part)
                    if num_bytes > limit:
                        text = f"the body is larger than {limit} bytes"
                        raise ApiError(413, text, code="request_too_large")
                    parts.append(part)
        except TimeoutError:
            raise _late() from None
        return b"".join(parts)

    async def _parts(self, request: Request) -> AsyncIterator[bytes]:
        """Yields the body as it arrives. Raises `ApiError` if nothing of it does for a while."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            text = f"Content-Encoding: is {encoding[:64]!r}, which is not supported; send the body uncompressed"
            raise ApiError(415, text, param="Content-Encoding", code="unsupported_encoding")
        parts = aiter(request.stream())
        while True:
            try:
                async with asyncio.timeout(self._settings.body_timeout_s):
                    part = await anext(parts, None)
            except TimeoutError:
                raise _late() from None
            except ClientDisconnect:
                raise ClientGone from None
            if part is None:
                return
            yield part

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        try:
            models = await self._client.list_models(metadata=_metadata(request))
        except InflightError as error:
            raise from_router(error, "model") from None
        entries = [entry for model in models for entry in model_objects(model, self._began)]
        listed = {"object": "list", "data": entries}
        if "client_version" in request.query_params:
            listed["models"] = [codex_model(entry) for entry in entries]
        return _json(encoded(listed))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        name = request.path_params["name"]
        try:
            models = await self._client.list_models(metadata=_metadata(request))
        except InflightError as error:
            raise from_router(error, "model") from None
        for model in models:
            for entry in model_objects(model, self._began):
                if entry["id"] == name:
                    return _json(encoded(entry))
        raise ApiError(404, f"model: there is no model {name[:100]!r}", param="model", code="model_not_found")

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`, as vLLM has it."""
        metadata = _metadata(request)
        asked = parse_tokenize(await self._body(request))
        try:
            answer = await while_connected(request.receive, self._client.send_tokenize(asked, metadata=metadata))
        except InflightError as error:
            raise from_router(error, "prompt" if asked.HasField("text") else "messages") from None
        # There may be as many token ids as in several prompts: streams go on meanwhile.
        return _json(await asyncio.to_thread(lambda: encoded(tokenized(asked, answer))))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`, as vLLM has it."""
        metadata = _metadata(request)
        body = parse_detokenize(await self._body(request))
        work = self._client.detokenize(body.tokens, model=body.model, skip_special_tokens=False, metadata=metadata)
        try:
            text = await while_connected(request.receive, work)
        except InflightError as error:
            raise from_router(error, "tokens") from None
        return _json(encoded({"prompt": text}))

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`."""
        return await self._embed(request, parse_embeddings)

    async def rerank(self, request: Request) -> Response:
        """`POST /v1/rerank`, as Cohere and Jina have it."""
        return await self._embed(request, parse_rerank)

    async def score(self, request: Request) -> Response:
        """`POST /v1/score`, as vLLM has it."""
        return await self._embed(request, parse_score)

    async def _embed(self, request: Request, parse: Callable[[bytes, Defaults], EmbedCall]) -> Response:
        metadata = _metadata(request)
        call = parse(await self._body(request), self._defaults)
        self._report_unused(request, call.unused)
        try:
            response = await while_connected(request.receive, self._client.send_embed(call.request, metadata=metadata))
        except InflightError as error:
            raise call.error_of(error) from None
        # There may be millions of numbers: streams go on meanwhile.
        return _json(await asyncio.to_thread(lambda: encoded(call.answer(response))))

    async def root(self, request: Request) -> Response:
        """`HEAD /`, which coding agents use to see whether the server is there."""
        return PlainTextResponse("inflight\n")

    async def version(self, request: Request) -> Response:
        """`GET /version`, as vLLM has it."""
        return _json(encoded({"version": installed_version()}))

    async def health(self, request: Request) -> Response:
        """`GET /health`: the process is alive."""
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: a router serves. Calls are spread over the routers, so each is tried."""
        for _ in range(max(2, len(self._settings.routers))):
            if await self._client.is_serving(timeout=READY_TIMEOUT_S):
                return PlainTextResponse("ready\n")
        return PlainTextResponse("no router serves\n", status_code=503)


def _shown(answer: dict[str, Any] | ASGIApp) -> ASGIApp:
    """Returns the response for a stored response, which may be a stream already."""
    return _json(encoded(answer)) if isinstance(answer, dict) else answer


def _late() -> ApiError:
    return ApiError(408, "the body did not arrive in time", may_retry=False)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _metadata(request: Request) -> dict[str, str]:
    """Returns the metadata that is passed on to the router unchanged: credentials and trace context."""
    metadata = {
        name: value
        for name, allowed in PASSED_ON.items()
        if (value := request.headers.get(name)) is not None and allowed.fullmatch(value)
    }
    shown = request.headers.getlist("authorization")
    # Anthropic's header of a key. A client may send the same key in both.
    keys = [f"Bearer {key}" for key in request.headers.getlist("x-api-key")]
    shown += [key for key in keys if key not in shown]
    if len(shown) > 1:
        # A proxy may have checked the other one.
        raise refused("Authorization", f"was sent {len(shown)} times; one is allowed", "several_credentials")
    for authorization in shown:
        is_plain = authorization.isascii() and authorization.isprintable()
        if not is_plain or len(authorization) > MAX_AUTHORIZATION_CHARACTERS:
            raise ApiError(401, "Authorization: is not a valid key", "authentication_error", code="invalid_api_key")
        metadata["authorization"] = authorization
    return metadata


def _key(request: Request) -> str:
    key = request.headers.get(KEY_HEADER, "")
    if key and not _KEY.fullmatch(key):
        raise refused(KEY_HEADER, "must be printable ASCII without spaces")
    return key
