"""A program of LangChain, LiteLLM or instructor that calls two tools. Runs in the environment of that client.

Arguments: the client, and the URL of the API. Prints what it called and the final answer as JSON.
"""

from __future__ import annotations

import json
import sys
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


def langchain(url: str) -> dict[str, Any]:
    """LangChain's agent, streamed."""
    from langchain.agents import create_agent  # type: ignore[import-not-found, unused-ignore]
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found, unused-ignore]

    def get_weather(city: str) -> str:
        """Returns the weather."""
        return "result of get_weather"

    def get_time() -> str:
        """Returns the time."""
        return "result of get_time"

    model = ChatOpenAI(base_url=url, api_key="none", model="smol", streaming=True)
    messages = create_agent(model, [get_weather, get_time]).invoke({"messages": [("user", QUESTION)]})["messages"]
    called = [[call["name"], call["args"]] for one in messages for call in getattr(one, "tool_calls", ())]
    return {"called": called, "answer": messages[-1].content}


def litellm(url: str) -> dict[str, Any]:
    """The same with LiteLLM, not streamed."""
    from litellm import completion  # type: ignore[import-not-found, unused-ignore]

    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    called: list[Any] = []
    while True:
        answer = completion(model="openai/smol", api_base=url, api_key="none", messages=turns, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return {"called": called, "answer": message.content}
        turns.append(message)
        for call in message.tool_calls:
            called.append([call.function.name, json.loads(call.function.arguments)])
            result = f"result of {call.function.name}"
            turns.append({"role": "tool", "tool_call_id": call.id, "content": result})


def instructor(url: str) -> dict[str, Any]:
    """An object by instructor's mode that calls a tool of the name of its class."""
    from instructor import Mode, from_openai  # type: ignore[import-not-found, unused-ignore]
    from openai import OpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    client = from_openai(OpenAI(base_url=url, api_key="none"), mode=Mode.TOOLS)
    made = client.chat.completions.create(
        model="smol", messages=[{"role": "user", "content": QUESTION}], response_model=Weather
    )
    return {"called": [["Weather", made.model_dump()]], "answer": ""}


if __name__ == "__main__":
    print(json.dumps({"langchain": langchain, "litellm": litellm, "instructor": instructor}[sys.argv[1]](sys.argv[2])))
