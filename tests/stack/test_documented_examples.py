"""The examples of the README, the quick start, the recipes and the pages about OpenAI's and Triton's clients.

Each is run with the default model as it stands in the page, with other ports, and its answer must be right. An example
that imports a client of others runs in the environment of that client.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from inflight import Client
from inflight.local.stack import LocalStack
from tests.clients.environments import python_of

ROOT = Path(__file__).parents[2]
# The pages, and the languages of the examples that each has.
PAGES = {
    "README.md": {"console", "python"},
    "docs/quickstart.md": {"console", "python"},
    "docs/gateway.md": {"bash", "python"},
    "docs/responses.md": {"python"},
    "docs/batches.md": {"python"},
    "docs/kserve.md": {"python"},
    "docs/recipes.md": {"bash", "python"},
    "docs/tools.md": {"python"},
}
# Where examples run that import a package of others; all others run where the tests do.
ENVIRONMENTS = {
    "tritonclient": "tritonclient",
    "langchain": "frameworks",
    "litellm": "frameworks",
    "instructor": "instructor",
}
# Its examples print an object of the class that they define, or an answer of the form that they ask for.
STRUCTURED_PAGE = "docs/structured-output.md"
STRUCTURED_ANSWER = re.compile(r"name='[^\n]*' population=-?\d+|\{.*\}|yes|no", re.DOTALL)
BLOCK = re.compile(r"^```(console|bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# The commands whose output is an answer.
ASKING = re.compile(r"inflight generate|curl \S*/v1/(chat/)?completions")
# What is asked, and words of which one is in every right answer.
ANSWERS = {
    "What is the capital of": ("Paris",),
    "The capital of France is": ("Paris",),
    "What is the weather in": ("get_weather",),
    "Name three fruits": ("Bananas", "Oranges", "Grapes"),
}


@dataclass(frozen=True, slots=True)
class Example:
    """A snippet of Python, or a command for a shell, with what the page shows that it prints first."""

    page: str
    code: str
    language: str
    printed: str = ""

    @property
    def right_words(self) -> list[tuple[str, ...]]:
        """Words for each question that is asked; the answer must have one of each."""
        return [words for question, words in ANSWERS.items() if question in self.code]

    @property
    def environment(self) -> str:
        """The client's environment in `.clients`; empty: that of the tests."""
        imported = re.findall(r"^(?:import|from) ([a-z]+)", self.code, re.MULTILINE)
        return next((ENVIRONMENTS[module] for module in imported if module in ENVIRONMENTS), "")


def examples() -> Iterator[Example]:
    """All examples that are answered by the model."""
    for page in (*PAGES, STRUCTURED_PAGE):
        for language, block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            if language == "python":
                yield Example(page, block, language)
            else:
                yield from (one for one in commands(page, language, block) if ASKING.match(one.code))


def commands(page: str, language: str, block: str) -> Iterator[Example]:
    """The commands of a block: in a console what follows `$ `, up to the end of its quotes; in a script every one."""
    lines = block.splitlines()
    while lines:
        line = lines.pop(0)
        if language == "console" and not line.startswith("$ "):
            continue
        code = line.removeprefix("$ ")
        while code.count("'") % 2:
            code += "\n" + lines.pop(0)
        printed = lines[0] if language == "console" and lines and not lines[0].startswith("$ ") else ""
        yield Example(page, code.partition("  #")[0].strip(), language, printed=printed)


ALL_EXAMPLES = list(examples())
EXAMPLES = [example for example in ALL_EXAMPLES if example.page != STRUCTURED_PAGE]
STRUCTURED_EXAMPLES = [example for example in ALL_EXAMPLES if example.page == STRUCTURED_PAGE]


def test_every_page_has_examples() -> None:
    assert {(example.page, example.language) for example in EXAMPLES} == {
        (page, language) for page, languages in PAGES.items() for language in languages
    }


def test_recipes_drive_every_client_of_others() -> None:
    assert {example.environment for example in ALL_EXAMPLES} == {"", *ENVIRONMENTS.values()}


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{one.page}-{number}" for number, one in enumerate(EXAMPLES)])
def test_documented_example_is_answered_right(default_stack: LocalStack, example: Example) -> None:
    said = run(default_stack, example)
    assert example.right_words
    assert all(any(word in said for word in words) for words in example.right_words), said
    assert said.startswith(example.printed), "what the page shows is what is printed"


@pytest.mark.parametrize("example", STRUCTURED_EXAMPLES, ids=range(len(STRUCTURED_EXAMPLES)))
def test_documented_example_of_structured_output_has_the_form(default_stack: LocalStack, example: Example) -> None:
    assert STRUCTURED_ANSWER.fullmatch(run(default_stack, example).strip())


def test_request_that_says_nothing_about_sampling_gets_what_the_models_authors_recommend(
    default_stack: LocalStack,
) -> None:
    with Client(default_stack.address) as client:
        sampled = [client.complete(chat="Name a fruit.", seed=seed, max_tokens=24).text for seed in range(4)]
        recommended = [
            client.complete(chat="Name a fruit.", seed=seed, max_tokens=24, temperature=0.2, top_p=0.9).text
            for seed in range(4)
        ]
        assert sampled == recommended
        hot = [client.complete(chat="Name a fruit.", seed=s, max_tokens=24, temperature=1).text for s in range(4)]
        assert hot != recommended, "so the comparison above tells the two apart"


def run(stack: LocalStack, example: Example) -> str:
    """What the example prints, in a folder in which `inflight up` has started the stack."""
    code = example.code.replace("localhost:50051", stack.address).replace("127.0.0.1:8000", stack.gateway_addresses[0])
    inflight = f'inflight() {{ "{sys.executable}" -m inflight.cli.main "$@"; }}\n'
    python = python_of(example.environment) if example.environment else sys.executable
    command = [python, "-c", code] if example.language == "python" else ["bash", "-c", inflight + code]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment.pop("INFLIGHT_ADDRESS", None)
    environment.pop("PYTHONPATH", None)
    if not example.environment:
        environment["PYTHONPATH"] = str(ROOT)
    ended = subprocess.run(
        command,
        cwd=stack.options.run_dir.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
