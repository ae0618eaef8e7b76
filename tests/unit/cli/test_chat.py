"""`inflight chat`: commands, messages of several lines, and what Ctrl-C does at a real terminal."""

from __future__ import annotations

import io
import itertools
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from inflight.cli.chat.commands import ChatState, run_command
from inflight.cli.chat.conversation import Conversation, ConversationError
from inflight.cli.chat.prompt import Prompt
from inflight.cli.main import main
from inflight.v1 import inference_pb2, types_pb2
from tests.support.stack.pseudo_terminal import CTRL_C, CTRL_D, UP, at_terminal
from tests.unit.scripted_router import WORDS, ScriptedRouter, accepted, asked, delta, serving, speak

SAID = "The capital is Paris."

# --- commands


@pytest.fixture
def state() -> ChatState:
    state = ChatState(Conversation("be brief"), lambda: ["smol", "large"])
    state.conversation.answered("one", "two")
    return state


def test_reset_keeps_the_system_message(state: ChatState) -> None:
    assert run_command(state, "/reset") == "conversation cleared"
    assert state.conversation.asking("x") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "x"},
    ]


def test_system_begins_anew(state: ChatState) -> None:
    assert run_command(state, "/system") == "be brief"
    run_command(state, "/system speak French")
    assert state.conversation.messages == [{"role": "system", "content": "speak French"}]
    run_command(state, "/system default")
    assert state.conversation.messages == []


def test_settings_are_read_shown_and_unset(state: ChatState) -> None:
    assert run_command(state, "/set temperature 0.5") == "temperature is 0.5"
    assert run_command(state, "/set max_tokens 20") == "max_tokens is 20"
    assert run_command(state, "/set") == "temperature 0.5\nmax_tokens 20"
    assert run_command(state, "/set max_tokens many") == "max_tokens: 'many' is not a number"
    assert run_command(state, "/set hue red").startswith("/set takes temperature")
    run_command(state, "/set max_tokens default")
    assert state.options == {"temperature": 0.5}


def test_a_model_that_is_not_there_is_not_taken(state: ChatState) -> None:
    assert run_command(state, "/model huge") == "unknown model 'huge'; served: smol, large"
    assert run_command(state, "/model large") == "model is large"
    assert run_command(state, "/model") == "  smol\n* large"
    assert state.options == {"model": "large"}


def test_a_conversation_is_saved_for_its_user_only_and_goes_on(state: ChatState, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    assert run_command(state, f"/save {path}") == f"saved 3 messages to {path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = Conversation(None)
    other.load(path)
    assert other.messages == state.conversation.messages
    assert json.loads(path.read_text())["messages"][0] == {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("content", ["", "[]", '{"messages": 1}', '{"messages": [{"role": "user"}]}'])
def test_a_file_that_is_no_conversation_changes_nothing(state: ChatState, tmp_path: Path, content: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(content)
    before = state.conversation.messages
    assert str(path) in run_command(state, f"/load {path}")
    assert "No such file" in run_command(state, "/load /nowhere/at/all")
    assert "No such file" in run_command(state, "/save /nowhere/at/all")
    assert state.conversation.messages == before


def test_unknown_commands_point_to_the_help(state: ChatState) -> None:
    assert run_command(state, "/what") == "unknown command /what; /help lists the commands"
    assert "/set [NAME VALUE]" in run_command(state, "/help")
    run_command(state, "/quit")
    assert state.has_left


def test_load_of_no_conversation_says_why() -> None:
    with pytest.raises(ConversationError, match="cannot read"):
        Conversation(None).load(Path("/nowhere/at/all"))


# --- messages


def prompt_of(*lines: str | BaseException, is_terminal: bool = True) -> Prompt:
    left = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return Prompt(is_terminal=is_terminal, read_line=read_line)


def test_a_message_may_have_several_lines() -> None:
    prompt = prompt_of("one \\", "two", '"""three', "", '  four"""', '"""five"""', "six\\")
    assert [prompt.read() for _ in range(5)] == ["one \ntwo", "three\n\n  four", "five", "six", None]


def test_an_interrupted_line_is_dropped_and_two_leave() -> None:
    prompt = prompt_of(KeyboardInterrupt(), "said", '"""half', KeyboardInterrupt(), KeyboardInterrupt(), "never")
    assert prompt.read() == "said"
    assert prompt.read() is None


def test_an_interrupt_in_a_pipe_leaves_at_once() -> None:
    assert prompt_of(KeyboardInterrupt(), "never", is_terminal=False).read() is None


def test_a_pipe_sets_what_requests_ask_for(
    address: str, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "/set temperature 0.5",
        "/set stop END",
        "hi",
        "//slash",
        "/set max_tokens -1",
        "third",
        "/exit",
        "never",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", "--seed", "7", "--address", address]) == 0
    first, second, third = asked(router)
    assert first.sampling == types_pb2.SamplingParams(temperature=0.5, seed=7)
    assert list(first.stopping.stop) == ["END"]
    assert second.chat.messages[-1].content[0].text == "/slash"
    output = capsys.readouterr()
    assert output.out == f"{SAID}\n{SAID}\n{SAID}\n"
    assert "max_tokens: is -1; must be at least 1" in output.err
    assert not third.stopping.HasField("max_tokens"), "what is refused is not taken"


# --- at a terminal


def patient(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.StreamEvent]:
    """Speaks without an end where it is told to, and else the usual."""
    if "without end" not in request.chat.messages[-1].content[0].text:
        yield from speak(WORDS)
        return
    yield accepted()
    for offset in itertools.count():
        if not context.is_active():
            return
        yield delta("on and \x1b[31mon ", offset)


@pytest.fixture
def endless() -> Iterator[tuple[ScriptedRouter, str]]:
    router = ScriptedRouter(patient)
    with serving(router) as address:
        yield router, address


def test_ctrl_c_cancels_the_answer_on_the_router_and_the_chat_goes_on(
    endless: tuple[ScriptedRouter, str], tmp_path: Path
) -> None:
    router, address = endless
    with at_terminal("chat", "--address", address, environment={"XDG_STATE_HOME": str(tmp_path)}) as terminal:
        terminal.expect(f"smol at {address}.")
        terminal.expect("> ")
        terminal.enter("talk without end")
        terminal.expect("on and ")
        terminal.type(CTRL_C)
        terminal.expect("cancelled")
        assert router.ended.wait(60)
        assert "\x1b[31m" not in terminal.screen, "what a model says does not command the terminal"
        terminal.expect("> ")
        terminal.enter("and now?")
        terminal.expect(SAID)
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
        assert terminal.is_cooked()
    first, second = asked(router)
    assert [message.role for message in second.chat.messages] == ["user", "assistant", "user"]
    assert first.chat.messages[0].content[0].text == "talk without end"


def test_ctrl_c_at_the_prompt_drops_the_line_and_twice_leaves(
    endless: tuple[ScriptedRouter, str], tmp_path: Path
) -> None:
    router, address = endless
    with at_terminal("chat", "--address", address, environment={"XDG_STATE_HOME": str(tmp_path)}) as terminal:
        terminal.expect("> ")
        terminal.type("half a th")
        terminal.expect("half a th")
        terminal.interrupt_the_prompt()
        terminal.expect("Ctrl-C again")
        terminal.expect("> ")
        terminal.enter("whole")
        terminal.expect(SAID)
        terminal.expect("> ")
        terminal.interrupt_the_prompt()
        terminal.expect("Ctrl-C again")
        terminal.expect("> ")
        terminal.interrupt_the_prompt()
        assert terminal.wait() == 0
    assert [request.chat.messages[0].content[0].text for request in asked(router)] == ["whole"]


def test_what_was_typed_is_there_again_in_the_next_chat(endless: tuple[ScriptedRouter, str], tmp_path: Path) -> None:
    router, address = endless
    history = tmp_path / "history"
    for typed in ("remember me\r", f"{UP}{UP}\r"):
        with at_terminal("chat", "--history-file", str(history), "--address", address) as terminal:
            terminal.expect("> ")
            terminal.type(typed)
            terminal.expect(SAID)
            terminal.expect("> ")
            terminal.enter("/exit")
            assert terminal.wait() == 0
    assert [request.chat.messages[0].content[0].text for request in asked(router)] == ["remember me"] * 2
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
