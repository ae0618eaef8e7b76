"""Coding agents from npm, unmodified, one for each API: an executor is killed in the middle of the call of a tool."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from inflight import AsyncClient
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.local.state import read_state
from tests.integration.test_agents import CLAUDE_CODE, CODEX, OPENCODE, Agent, fetched
from tests.support.stack.braked import ProcessBrake
from tests.support.stack.executors_linked import wait_for_executors
from tests.support.text.text_models import smollm2
from tests.unit.test_tool_parser import BY_NAME, written

# The first prompts of coding agents have tens of thousands of tokens.
CONTEXT_LENGTH = 65536
HIDDEN_SIZE = 64
# The logit of a successor is 160, and those of other tokens are some 70 lower: they are never sampled.
WEIGHT_SCALE = 20.0
MIN_PIECE_CHARACTERS = 4
MARKERS = re.compile("(</?tool_call>)")


def save_fixed_model(folder: Path, texts: Mapping[str, str], template: str) -> dict[str, int]:
    """Makes a Hugging Face folder of a model that says one of `texts`: that of the token, its key, with which the chat
    template ends the prompt. Returns how many tokens each has."""
    smollm2().save_pretrained(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    used: set[str] = set()
    answers = {start: list(_pieces(text, used)) for start, text in texts.items()}
    tokenizer.add_tokens([AddedToken(start, special=True) for start in answers])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in used])
    tokenizer.save_pretrained(folder)
    chains: list[list[int]] = []
    for start, pieces in answers.items():
        token_ids: Any = tokenizer.convert_tokens_to_ids([start, *pieces, str(tokenizer.eos_token)])
        chains.append(token_ids)
    _network(len(tokenizer), chains).save_pretrained(folder)
    return {start: len(pieces) for start, pieces in answers.items()}


def _pieces(text: str, used: set[str]) -> Iterator[str]:
    """Divides a text into tokens of which each has one successor: none is in `used`, to which they are added. The
    markers of calls are tokens of their own, as in most models."""
    for part in filter(None, MARKERS.split(text)):
        start = 0
        while start < len(part):
            ends = range(start + MIN_PIECE_CHARACTERS, len(part) - MIN_PIECE_CHARACTERS)
            free = (end for end in ends if part[start:end] not in used)
            end = len(part) if MARKERS.fullmatch(part) else next(free, len(part))
            piece, start = part[start:end], end
            assert piece not in used, f"{piece!r} occurs twice"
            used.add(piece)
            yield piece


def _network(vocabulary_size: int, chains: list[list[int]]) -> Any:
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network: Any = LlamaForCausalLM(config)
        embeddings, successors = network.model.embed_tokens.weight, network.lm_head.weight
        embeddings.copy_(torch.nn.functional.normalize(torch.randn_like(embeddings), dim=-1))
        successors.zero_()
        for chain in chains:
            for token_id, next_id in itertools.pairwise(chain):
                successors[next_id] += WEIGHT_SCALE * embeddings[token_id]
        # What attention and the other layers add.
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return network


EXECUTOR_ARGS = (
    *("--dtype", "float32"),
    *("--max-tokens-in-paged-kv-cache", "65536"),
    *("--max-num-tokens", "2048"),
    *("--num-threads", "1"),
)
PATIENCE_S = 240.0
ROUTES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
CALLS, ANSWERS = "<|calls|>", "<|answers|>"
# The model answers when it has the result, and calls the tool before.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if tools and 'the number is 4711' not in messages[-1].content %}<|calls|>{% else %}<|answers|>{% endif %}"
    "{% endif %}"
)


# The gateway resumes their streams whatever agent reads them.
@pytest.mark.parametrize("agent", [OPENCODE, CLAUDE_CODE, CODEX], ids=ROUTES)
async def test_agent_finishes_its_round_when_an_executor_is_killed_in_the_call(agent: Agent, tmp_path: Path) -> None:
    fetched(agent.package, agent.command)  # or the test is skipped
    secret = tmp_path / "secret.txt"
    secret.write_text("the number is 4711\n")
    texts = {CALLS: "I read it.\n" + written(BY_NAME["hermes"], [agent.call(secret)]), ANSWERS: "It is 4711."}
    num_tokens = save_fixed_model(tmp_path / "fixed", texts, TEMPLATE)[CALLS]
    brake = ProcessBrake(tmp_path / "brake")
    options = StackOptions(
        executors=2,
        gateways=1,
        model=str(tmp_path / "fixed"),
        executor_args=EXECUTOR_ARGS,
        run_dir=tmp_path / "run",
        program=brake.program(num_tokens * 2 // 3),
    )
    async with LocalStack(options) as stack:
        await wait_for_executors(stack.address, options.executors)
        brake.hold()
        url = f"http://{stack.gateway_addresses[0]}"
        running = asyncio.create_task(agent.run(url, "fixed", tmp_path))
        async with asyncio.timeout(PATIENCE_S):
            await brake.until_waited_for()
            os.kill(await pid_of_the_busy_executor(stack, options), signal.SIGKILL)
        brake.release()
        assert "It is 4711." in await running
        # It has not sent its request again: its stream went on.
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as http:
            metrics = (await http.get(f"{url}/metrics")).text
        counted = re.findall(
            r'^inflight_gateway_requests_total{route="(/v1/[^"]*)",status="(\d+)"} (\S+)', metrics, re.M
        )
        assert [(status, float(count)) for route, status, count in counted if route in ROUTES] == [("200", 2)]


async def pid_of_the_busy_executor(stack: LocalStack, options: StackOptions) -> int:
    async with AsyncClient(stack.address) as client:
        while not (busy := [one for one in (await client.capacity()).executors if one.seats_used]):
            await asyncio.sleep(0.01)
    state = read_state(options.run_dir)
    assert state is not None
    return next(one.pid for one in state.processes if one.name == busy[0].executor_id)
