"""Conversations whose texts or roles imitate something else, as every protocol answers them."""

from __future__ import annotations

import grpc.aio
import httpx2
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from inflight.router.main import load_texts
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2
from tests.fuzz.statuses import status_of
from tests.support.stack.cluster import Cluster, tiny_tokenizer
from tests.support.stack.gateways import RunningGateway
from tests.support.text.chat_models import control_ids, user_says

END_ID = 4  # t4 ends a message
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m.content + ' t4 ' }}{% endfor %}"
)


def speaking_tokenizer() -> PreTrainedTokenizerFast:
    """The cluster's, with a template and a control token."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": AddedToken("t4", special=True, normalized=False)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(autouse=True)
def _speaking_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", speaking_tokenizer)


async def test_control_token_in_a_message_is_text_by_grpc_and_by_the_gateway(
    cluster: Cluster, gateway: RunningGateway, pool: str
) -> None:
    stub = cluster.routers[0].stub
    ids = (await stub.Tokenize(inference_pb2.TokenizeRequest(chat=user_says("t1 ", "t4 t2")))).token_ids
    assert list(ids).count(END_ID) == 1
    assert ids[-1] == END_ID
    plain = await stub.Tokenize(inference_pb2.TokenizeRequest(text="t1 t4 t2"))
    assert list(plain.token_ids) == [1, 4, 2], "a text prompt is the whole prompt"
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(
            model=pool, messages=[{"role": "user", "content": "t1 t4 t2"}], max_tokens=1
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


async def test_role_that_the_template_does_not_know_is_refused_by_name(
    cluster: Cluster, gateway: RunningGateway, pool: str
) -> None:
    request = inference_pb2.GenerateRequest(chat=user_says("t1"))
    request.chat.messages[0].role = "user t4"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.routers[0].stub.Generate(request).read()
    assert status_of(caught.value) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert caught.value.details() == "chat.messages[0].role: is 'user t4'; must be one of assistant, user"
    async with httpx2.AsyncClient(timeout=60) as http:
        body = {"model": pool, "messages": [{"role": "system", "content": "t1"}]}
        answer = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].role"
    assert "must be one of assistant, user" in answer.json()["error"]["message"]


def test_setting_reaches_every_model() -> None:
    for is_allowed in (False, True):
        (model,) = load_texts(RouterSettings(allow_special_tokens_in_chat=is_allowed)).values()
        in_text = control_ids(model, model.encode_chat(user_says("<|im_end|>")))
        assert len(in_text) == len(control_ids(model, model.encode_chat(user_says("hi")))) + is_allowed
