"""The stack's own cases with executors around vLLM: what clients ask of SmolLM2 is answered as by our own engine, or
refused by name; and admission, which is the ledger's.

The imported tests are those of `tests/stack`. They run here with the `stack` of this folder.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import openai
import pytest

from inflight import AsyncClient, FinishReason
from inflight.errors import InflightError
from inflight.kserve import grpc_service_pb2_grpc
from inflight.local.stack import LocalStack
from tests.integration.test_gateway_messages import anthropic_of, text_of
from tests.integration.test_kserve import by_ids, output_ids
from tests.stack.test_chat import (  # noqa: F401
    test_chat_answers_and_ends_at_the_models_end_of_sequence,
    test_models_and_token_ids_are_told,
    test_repeated_prompt_is_served_from_the_prefix_cache,
    test_stop_string_ends_the_text_before_it,
    test_synchronous_client_reads_the_same_answer,
)
from tests.stack.test_gateway import (  # noqa: F401
    test_log_probabilities_of_a_chat_are_those_of_its_text,
    test_openais_client_chats_whole_in_pieces_and_synchronously,
    test_parts_of_a_character_come_with_their_bytes,
    test_stop_seed_and_n_do_what_openai_says,
)
from tests.stack.test_responses import (  # noqa: F401
    test_input_of_a_custom_tool_satisfies_its_grammar_or_expression,
    test_openais_client_gets_a_response_whole_and_streamed,
    test_openais_client_gets_calls_whole_and_streamed_and_returns_their_results,
    test_openais_client_parses_responses_whole_and_streamed,
)
from tests.stack.test_structured_output import (  # noqa: F401
    test_command_line_takes_a_schema,
    test_every_kind_of_constraint_holds_and_a_cut_output_says_so,
    test_openais_client_parses_answers_whole_and_streamed,
    test_unsupported_schema_is_refused_and_named,
)
from tests.stack.test_tools import (  # noqa: F401
    test_free_choice_is_text_or_valid_calls,
    test_named_allowed_and_forbidden_tools_are_what_is_called,
    test_our_client_refuses_what_is_no_tool,
    test_parts_of_a_resumed_stream_continue_within_the_arguments,
    test_required_call_is_valid_whole_and_in_pieces,
    test_results_of_calls_go_back_to_the_model,
    test_unusable_tools_are_refused_by_name,
)
from tests.support.stack.gateways import run_gateway
from tests.vllm.conftest import NUM_SEATS, NUM_STANDBY

pytestmark = pytest.mark.timeout(1500)

MODEL = "SmolLM2-135M-Instruct"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
# Of a request in the crowd. What is placed already, on two executors, goes before anything that comes later.
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
NUM_PLACED = 2 * (NUM_SEATS + NUM_STANDBY)


async def test_anthropics_client_gets_the_message_of_the_chat(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        chat = await client.chat.completions.create(**CHAT, temperature=0, max_tokens=24)
        asked: dict[str, Any] = {**CHAT, "max_tokens": 24, "extra_body": {"temperature": 0}}
        async with anthropic_of(gateway) as claude:
            message = await claude.messages.create(**asked)
            async with claude.messages.stream(**asked) as stream:
                final = await stream.get_final_message()
    assert text_of(message) == text_of(final) == chat.choices[0].message.content


async def test_kserves_api_gives_the_tokens_of_generate(stack: LocalStack) -> None:
    async with AsyncClient(stack.address) as client:
        prompt = await client.tokenize("Once upon a time")
        expected = await client.complete(token_ids=prompt, want_token_ids=True, **SHORT)
    async with grpc.aio.insecure_channel(stack.address) as channel:
        request = by_ids(list(prompt), 4)
        request.model_name = MODEL
        stub: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = await stub.ModelInfer(request)
    assert output_ids(response) == list(expected.token_ids)


async def test_what_vllm_cannot_do_is_refused_by_name(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        refused: dict[str, dict[str, Any]] = {
            "no_repeat_ngram_size": {"extra_body": {"no_repeat_ngram_size": 2}},
            "temperature": {"temperature": 0.005},
            "min_tokens": {"extra_body": {"min_tokens": 2, "guided_choice": ["yes", "no"]}},
        }
        for name, fields in refused.items():
            with pytest.raises(openai.BadRequestError, match=name) as error:
                await client.chat.completions.create(**CHAT, **fields)
            assert name in str(error.value.param)
    async with AsyncClient(stack.address) as client:
        with pytest.raises(InflightError, match="no_repeat_ngram_size: vLLM has none") as ours:
            await client.complete("Hello", no_repeat_ngram_size=2)
        assert ours.value.code is grpc.StatusCode.UNIMPLEMENTED
        # Others are not affected.
        assert (await client.complete("Hello", exact_resume=True, temperature=0.8, max_tokens=2)).text


class Crowd:
    """Requests, and the order of their first tokens."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.begun: list[str] = []

    async def run(self, name: str, **options: Any) -> None:
        """Sends a request and reads it to its end."""
        async for _ in self._client.generate(name, **{**SHORT, **options}):
            if name not in self.begun:
                self.begun.append(name)


@pytest.mark.parametrize(
    ("many", "one"),
    [
        ({"tenant": "flood"}, {"tenant": "quiet"}),
        ({"tenant": "flood", "priority": "batch"}, {"tenant": "flood", "priority": "interactive"}),
    ],
    ids=["another tenant", "a higher class"],
)
async def test_sixty_requests_do_not_delay(stack: LocalStack, many: dict[str, Any], one: dict[str, Any]) -> None:
    async with AsyncClient(stack.address) as client:
        crowd = Crowd(client)
        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(crowd.run(f"Flood {number}.", **many))
            while len(crowd.begun) < 2:
                await asyncio.sleep(0.01)
            num_before = len(crowd.begun)
            group.create_task(crowd.run("One.", **one))
    # It waits for what has been placed, and others may get the seats that become free in the same step.
    assert crowd.begun.index("One.") - num_before <= 2 * NUM_PLACED
    assert len(crowd.begun) == 61


async def test_class_batch_gives_its_seats_to_other_classes_at_once(stack: LocalStack) -> None:
    async with AsyncClient(stack.address) as client, asyncio.TaskGroup() as group:
        long: dict[str, Any] = {**SHORT, "max_tokens": 100, "priority": "batch", "want_token_ids": True}
        batch = [group.create_task(client.complete(f"Batch {number}.", **long)) for number in range(NUM_PLACED)]
        while sum(one.seats_used for one in (await client.capacity()).executors) < 2 * NUM_SEATS:
            await asyncio.sleep(0.05)
        await client.complete("Now.", priority="interactive", **SHORT)
        assert not any(one.done() for one in batch)
    assert [len(one.result().token_ids) for one in batch] == [100] * NUM_PLACED


async def test_quotas_and_deadlines_refuse_at_once(stack: LocalStack) -> None:
    async with AsyncClient(stack.address) as client:
        await client.complete("One.", tenant="slow", **SHORT)
        with pytest.raises(InflightError, match="requests_per_s") as over_rate:
            await client.complete("Two.", tenant="slow", **SHORT)
        assert over_rate.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        crowd = Crowd(client)
        outcomes = await asyncio.gather(
            *(crowd.run(f"Narrow {number}.", tenant="narrow") for number in range(NUM_PLACED + 6)),
            return_exceptions=True,
        )
        refused = [one for one in outcomes if one is not None]
        assert refused
        assert len(refused) + len(crowd.begun) == len(outcomes)
        assert all(isinstance(one, InflightError) and "max_queue_requests" in str(one) for one in refused)
        # Nothing can come so early.
        try:
            late = await client.complete("Soon.", first_token_deadline_s=0.001, **SHORT)
            assert (late.finish_reason, late.text) == (FinishReason.DEADLINE, "")
        except InflightError as refused_at_once:
            assert refused_at_once.code is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017
