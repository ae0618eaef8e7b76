"""A program of a framework that calls two tools. Runs in the environment of that framework.

Arguments: one of CLIENTS, and the URL of the API. Prints what it called, sorted, and the final answer as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

QUESTION = "What is the weather in Ulm, and what time is it?"
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "description": "Returns the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"name": "get_time", "description": "Returns the time.", "parameters": {"type": "object", "properties": {}}},
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


CALLED: list[tuple[str, dict[str, Any]]] = []
KEY = "none"
MODEL = "smol"


def get_weather(city: str) -> str:
    """Returns the weather.

    Args:
        city: The city.
    """
    CALLED.append(("get_weather", {"city": city}))
    return "result of get_weather"


def get_time() -> str:
    """Returns the time."""
    CALLED.append(("get_time", {}))
    return "result of get_time"


FUNCTIONS_OF_PYTHON: list[Callable[..., str]] = [get_weather, get_time]


def langchain(url: str, **options: Any) -> Any:
    """LangChain's agent, streamed."""
    from langchain.agents import create_agent  # type: ignore[import-not-found, unused-ignore]
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found, unused-ignore]

    model = ChatOpenAI(base_url=url, api_key=KEY, model=MODEL, streaming=True, **options)
    agent = create_agent(model, FUNCTIONS_OF_PYTHON)
    return agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].text


def langgraph(url: str, **options: Any) -> Any:
    """A graph of LangGraph with a node for the model and one for the tools, its messages streamed."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph  # type: ignore[import-not-found, unused-ignore]
    from langgraph.prebuilt import ToolNode, tools_condition  # type: ignore[import-not-found, unused-ignore]

    model = ChatOpenAI(base_url=url, api_key=KEY, model=MODEL, **options).bind_tools(FUNCTIONS_OF_PYTHON)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(FUNCTIONS_OF_PYTHON))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    pieces = graph.compile().stream({"messages": [("user", QUESTION)]}, stream_mode="messages")
    last = [(piece.text, place["langgraph_step"]) for piece, place in pieces]
    return "".join(text for text, step in last if step == last[-1][1])


def openai_agents(url: str, api: str) -> Any:
    """An agent of OpenAI's framework, streamed."""
    import agents  # type: ignore[import-not-found, unused-ignore]

    made = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[api]
    model = made(model=MODEL, openai_client=agents.AsyncOpenAI(base_url=url, api_key=KEY))
    tools = [agents.function_tool(one) for one in FUNCTIONS_OF_PYTHON]

    async def run() -> Any:
        result = agents.Runner.run_streamed(agents.Agent(name="agent", model=model, tools=tools), QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def pydantic_ai(url: str, api: str) -> Any:
    """An agent of Pydantic AI, streamed."""
    from pydantic_ai import Agent  # type: ignore[import-not-found, unused-ignore]
    from pydantic_ai.models import openai  # type: ignore[import-not-found, unused-ignore]
    from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found, unused-ignore]

    made = {"chat": openai.OpenAIChatModel, "responses": openai.OpenAIResponsesModel}[api]
    model = made(MODEL, provider=OpenAIProvider(base_url=url, api_key=KEY))

    async def watch(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    return Agent(model, tools=FUNCTIONS_OF_PYTHON).run_sync(QUESTION, event_stream_handler=watch).output


def smolagents(url: str) -> Any:
    """An agent of smolagents, streamed. It calls a tool to answer, and shows results as a user's messages."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool  # type: ignore[import-not-found, unused-ignore]

    model = OpenAIModel(MODEL, api_base=url, api_key=KEY)
    return ToolCallingAgent([tool(one) for one in FUNCTIONS_OF_PYTHON], model, stream_outputs=True).run(QUESTION)


def haystack(url: str) -> Any:
    """An agent of Haystack, streamed."""
    from haystack.components.agents import Agent  # type: ignore[import-not-found, unused-ignore]
    from haystack.components.generators.chat import (  # type: ignore[import-not-found, unused-ignore]
        OpenAIChatGenerator,
    )
    from haystack.dataclasses import ChatMessage  # type: ignore[import-not-found, unused-ignore]
    from haystack.tools import create_tool_from_function  # type: ignore[import-not-found, unused-ignore]
    from haystack.utils import Secret  # type: ignore[import-not-found, unused-ignore]

    model = OpenAIChatGenerator(model=MODEL, api_base_url=url, api_key=Secret.from_token(KEY))
    tools = [create_tool_from_function(one) for one in FUNCTIONS_OF_PYTHON]
    agent = Agent(chat_generator=model, tools=tools, streaming_callback=lambda _: None)
    return agent.run(messages=[ChatMessage.from_user(QUESTION)])["last_message"].text


def autogen(url: str) -> Any:
    """An assistant of AutoGen, streamed."""
    from autogen_agentchat.agents import AssistantAgent  # type: ignore[import-not-found, unused-ignore]
    from autogen_core.models import ModelInfo  # type: ignore[import-not-found, unused-ignore]
    from autogen_ext.models.openai import (  # type: ignore[import-not-found, unused-ignore]
        OpenAIChatCompletionClient,
    )

    about = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)
    model = OpenAIChatCompletionClient(model=MODEL, base_url=url, api_key=KEY, model_info=about)
    agent = AssistantAgent(
        "agent", model, tools=FUNCTIONS_OF_PYTHON, model_client_stream=True, reflect_on_tool_use=True
    )
    return asyncio.run(agent.run(task=QUESTION)).messages[-1].content


def litellm(url: str) -> Any:
    """LiteLLM, not streamed."""
    from litellm import completion  # type: ignore[import-not-found, unused-ignore]

    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = completion(model=f"openai/{MODEL}", api_base=url, api_key=KEY, messages=turns, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        turns.append(message)
        for call in message.tool_calls:
            function = {one.__name__: one for one in FUNCTIONS_OF_PYTHON}[call.function.name]
            result = function(**json.loads(call.function.arguments))
            turns.append({"role": "tool", "tool_call_id": call.id, "content": result})


def dspy(url: str) -> Any:
    """DSPy's agent, which has tools described in its prompts, and reads calls from texts; not streamed."""
    import dspy  # type: ignore[import-not-found, unused-ignore]

    dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=url, api_key=KEY, cache=False))
    return dspy.ReAct("question -> answer", tools=FUNCTIONS_OF_PYTHON)(question=QUESTION).answer


def instructor(url: str) -> Any:
    """An object by instructor's mode that calls a tool of the name of its class."""
    from instructor import Mode, from_openai  # type: ignore[import-not-found, unused-ignore]
    from openai import OpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    client = from_openai(OpenAI(base_url=url, api_key=KEY), mode=Mode.TOOLS)
    made = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_model=Weather
    )
    return made.model_dump()


CLIENTS: dict[str, Callable[[str], Any]] = {
    "langchain": langchain,
    "langchain-responses": partial(langchain, use_responses_api=True),
    "langgraph": langgraph,
    "langgraph-responses": partial(langgraph, use_responses_api=True),
    "litellm": litellm,
    "instructor": instructor,
    "openai-agents": partial(openai_agents, api="chat"),
    "openai-agents-responses": partial(openai_agents, api="responses"),
    "pydantic-ai": partial(pydantic_ai, api="chat"),
    "pydantic-ai-responses": partial(pydantic_ai, api="responses"),
    "smolagents": smolagents,
    "haystack": haystack,
    "autogen": autogen,
    "dspy": dspy,
}

if __name__ == "__main__":
    answer = CLIENTS[sys.argv[1]](sys.argv[2])
    print(json.dumps({"called": sorted(CALLED), "answer": answer}))
