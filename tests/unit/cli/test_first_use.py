"""Typical mistakes of new users: each is answered with a line or two that say what to do."""

from __future__ import annotations

import asyncio
import io
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from inflight.cli import doctor
from inflight.cli.call_errors import in_words
from inflight.cli.chat.commands import ChatState, run_command
from inflight.cli.chat.conversation import Conversation
from inflight.cli.console import EXIT_USAGE, open_console
from inflight.cli.main import main
from inflight.cli.up import EXECUTOR_FLAGS, ROUTER_FLAGS
from inflight.common.rpc.server import GrpcServer
from inflight.errors import InflightError
from inflight.local.options import StackOptions
from inflight.local.port_holder import holder_of
from inflight.local.stack import LocalStack, StackError
from inflight.local.state import ProcessState, StackState, write_state
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import ScriptedRouter
from tools.reference.settings_page import settings_classes


def usage_error(*argv: str) -> int:
    """The exit code, however the command ends."""
    try:
        return main(list(argv))
    except SystemExit as ended:
        return int(ended.code or 0)


def run_stack_here(address: str, *processes: ProcessState, ca_file: str = "") -> None:
    """A local stack's state, as `inflight up` leaves it in the working directory."""
    Path("run").mkdir()
    write_state(Path("run"), StackState(os.getpid(), address, "redis://x", processes, ca_file))


# --- the prompt


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt_is_refused_with_a_hint(
    prompt: str, address: str, router: ScriptedRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", prompt, "--address", address]) == 2
    assert capsys.readouterr().err == ('error: the prompt is empty; example: inflight generate "Name three fruits."\n')
    assert router.requests.empty(), "nothing was sent"


@pytest.mark.parametrize("arguments", [(), ("-",), ("--raw",)])
def test_missing_prompt_and_an_empty_standard_input_are_refused(
    arguments: tuple[str, ...], address: str, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", *arguments, "--address", address]) == 2
    assert router.requests.empty()


def python_of(folder: Path, text: str) -> str:
    """A program that takes the place of the Python of vLLM's environment."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o700)
    return str(program)


def test_doctor_tells_whether_executors_can_run_with_the_python_of_vllm(tmp_path: Path) -> None:
    good = doctor.vllm(python_of(tmp_path, "echo 0.32.0"))
    assert (good.verdict, good.text) == (doctor.Verdict.GOOD, f"0.32.0 in {tmp_path / 'python'}")
    newer = doctor.vllm(python_of(tmp_path, "echo 'vLLM 9.0 is newer than 0.32' >&2; echo 9.0"))
    assert (newer.verdict, newer.advice) == (doctor.Verdict.SLOW, "vLLM 9.0 is newer than 0.32")
    lacking = doctor.vllm(python_of(tmp_path, "echo 'grpc_health is missing' >&2; exit 1"))
    assert (lacking.verdict, lacking.advice) == (doctor.Verdict.MISSING, "grpc_health is missing")
    absent = doctor.vllm(str(tmp_path / "nowhere"))
    assert absent.verdict is doctor.Verdict.MISSING


@pytest.mark.slow
def test_doctor_says_that_this_python_has_no_vllm() -> None:
    here = doctor.vllm(sys.executable)
    assert (here.verdict, "inflight[vllm]" in here.advice) == (doctor.Verdict.MISSING, True)


# --- did you mean


def test_mistyped_command_is_told_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate"]) == 2
    assert capsys.readouterr().err == (
        "error: unknown command 'genrate'; did you mean 'generate'? inflight --help lists all\n"
    )
    assert main(["xyzzy"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'xyzzy'; inflight --help lists all\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("up", "--exectors", "2"), "error: unknown flag --exectors; did you mean --executors?"),
        (("up", "--exectors=2"), "error: unknown flag --exectors; did you mean --executors?"),
        (("generate", "hi", "--temprature", "0"), "error: unknown flag --temprature; did you mean --temperature?"),
        (("models", "--colour"), "error: unknown flag --colour"),
        (("generate", "hi", "there"), "error: unexpected argument 'there'"),
        (("up", "--executors", "two"), "error: argument --executors: invalid int value: 'two'"),
        (("explain",), "error: the following arguments are required: REQUEST_ID"),
        (("key", "nwe", "--tenant", "a"), "error: argument ACTION: invalid choice: 'nwe'"),
        (("router", "--executor", "x"), "error: unknown argument '--executor'; did you mean '--executors'?"),
    ],
)
def test_mistyped_flag_is_told_the_nearest_one_in_two_lines(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert usage_error(*argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(words), error
    assert error.count("\n") <= 2
    assert "--help" in error or argv[0] == "router"


# --- healthcheck


async def test_healthcheck_without_arguments_asks_the_local_stack(capsys: pytest.CaptureFixture[str]) -> None:
    server = GrpcServer(["inflight.v1.InferenceService"])
    run_stack_here(await server.start("127.0.0.1:0"))
    assert await asyncio.to_thread(main, ["healthcheck"]) == 1
    assert "NOT_SERVING" in capsys.readouterr().out
    await server.set_serving(True)
    assert await asyncio.to_thread(main, ["healthcheck"]) == 0
    await server.stop(0)


def test_healthcheck_without_arguments_and_without_a_stack_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["healthcheck"]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in ("no local stack runs in run", "`inflight up`", "--address"))


# --- ports


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("option", "flag"), [("port", "--port"), ("http_port", "--http-port"), ("gateway_port", "--gateway-port")]
)
async def test_port_in_use_names_the_flag_and_who_has_it(
    option: str, flag: str, taken_port: int, tmp_path: Path
) -> None:
    options = StackOptions(gateways=1, run_dir=tmp_path / "run", **{option: taken_port})  # type: ignore[arg-type]
    with pytest.raises(StackError) as refused:
        await LocalStack(options).start()
    assert str(refused.value).startswith(f"cannot listen on 127.0.0.1:{taken_port}: the port is in use by ")
    assert f"(pid {os.getpid()})" in str(refused.value)
    assert str(refused.value).endswith(f"choose another port with {flag}")
    assert "Errno" not in str(refused.value)


def test_free_port_has_no_holder() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert holder_of(port) is None


# --- chat


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temperature -3", "temperature: is -3; must be a number of at least 0"),
        ("/set temperature nan", "temperature: is nan; must be a number of at least 0"),
        ("/set top_p 2", "top_p: is 2; must be above 0 and at most 1"),
        ("/set top_k -1", "top_k: is -1; must be at least 0 (0 keeps all tokens)"),
        ("/set presence_penalty 3", "presence_penalty: is 3; must be at least -2 and at most 2"),
        ("/set no_repeat_ngram_size -1", "no_repeat_ngram_size: is -1; must be at least 0"),
        ("/set max_tokens 0", "max_tokens: is 0; must be at least 1"),
        ("/set min_tokens -1", "min_tokens: is -1; must be at least 0"),
        ("/set seed -1", "seed: is -1; must be at least 0"),
        ("/set deadline_s 0", "deadline_s: is 0; must be above 0 and at most 604800"),
        ("/set priority urgent", "priority: 'urgent' is not one of interactive, standard, batch"),
        ("/set temperature warm", "temperature: 'warm' is not a number"),
        ("/set temprature 1", "unknown setting temprature; did you mean temperature?"),
    ],
)
def test_setting_that_cannot_hold_is_refused_at_once(line: str, said: str) -> None:
    state = ChatState(Conversation(None), lambda: ["smol"])
    assert run_command(state, line) == said
    assert state.options == {}


def test_mistyped_chat_command_is_told_the_nearest_one() -> None:
    state = ChatState(Conversation(None), lambda: ["smol"])
    assert (
        run_command(state, "/sytem be brief")
        == "unknown command /sytem; did you mean /system? /help lists the commands"
    )


# --- errors


def unavailable() -> InflightError:
    raw = "connections to all backends failing; last error: UNKNOWN: ipv6:%5B::1%5D:50051: connection refused"
    return InflightError(grpc.StatusCode.UNAVAILABLE, raw)


def test_grpcs_own_words_are_shown_on_demand_only() -> None:
    assert in_words(unavailable(), "localhost:50051") == (
        "no router answers at localhost:50051; `inflight up` starts one"
    )
    assert "connection refused" in in_words(unavailable(), "localhost:50051", is_verbose=True)


def test_verbose_flag_shows_grpcs_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--address", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "error: no router answers at 127.0.0.1:1; `inflight up` starts one\n"
    assert main(["models", "-v", "--address", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "hi"], ["generate", "hi", "--raw"], ["models"], ["top", "--once"]])
def test_address_that_no_host_has_is_a_usage_error_that_names_it(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # No DNS server is asked for a name with an empty part.
    assert main([*command, "--address", "no..host:50051"]) == EXIT_USAGE
    assert capsys.readouterr().err == (
        "error: the host name of the router 'no..host:50051' cannot be resolved; check --address (INFLIGHT_ADDRESS)\n"
    )


def test_system_message_without_a_chat_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--raw", "--system", "Be brief."]) == EXIT_USAGE
    assert capsys.readouterr().err == "error: --raw: not allowed with --system, which needs a chat\n"


def test_address_of_an_http_server_and_a_passed_timeout_are_explained() -> None:
    raw = "connections to all backends failing; last error: UNIMPLEMENTED: (Trying to connect an http1.x server)"
    assert in_words(InflightError(grpc.StatusCode.UNAVAILABLE, raw), "localhost:8000") == (
        "no router answers at localhost:8000; an HTTP server answers there, perhaps a gateway: give the address of a "
        "router"
    )
    late = InflightError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    assert in_words(late, "localhost:1") == "DEADLINE_EXCEEDED: Deadline Exceeded; the timeout of the call has passed"


# --- help


def test_help_of_up_shows_the_defaults_of_what_it_passes_on() -> None:
    classes = dict(settings_classes())
    for flags, process in ((EXECUTOR_FLAGS, "executor"), (ROUTER_FLAGS, "router")):
        for flag, text in flags.items():
            default = classes[process].model_fields[flag.strip("-").replace("-", "_")].default
            shown = re.search(r"\(default: (.*)\)$", text)
            assert shown is not None, flag
            if default == 0:
                assert shown.group(1).startswith("from "), flag
                continue
            expected = "none" if default is None else str(default)
            assert shown.group(1).replace(",", "") == expected, flag


# --- output


@pytest.mark.parametrize(
    "argv", [("doctor",), ("size",), ("status",), ("models",), ("top", "--once")], ids=lambda argv: argv[0]
)
def test_piped_output_has_no_trailing_blanks(
    argv: tuple[str, ...],
    address: str,
    router: ScriptedRouter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Without the examination that builds kernels.
    monkeypatch.setattr(doctor, "examinations", lambda model: (doctor.python, doctor.memory, doctor.gpu))
    router.capacity = inference_pb2.GetCapacityResponse(
        executors=[inference_pb2.ExecutorCapacity(executor_id="e0", model="smol", seats_total=4)]
    )
    router.stats = [inference_pb2.GetStatsResponse(router_id="r", timestamp_ms=time_ms) for time_ms in (1000, 2000)]
    main([*argv, *(() if argv[0] in ("doctor", "size") else ("--address", address))])
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert [line for line in lines if line != line.rstrip()] == []


def test_blanks_within_a_line_stay_however_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    console = open_console()
    console.print("a  ", end="")
    console.print("b  ")
    console.print("  c")
    assert capsys.readouterr().out == "a  b\n  c\n"


# --- keys


def test_key_for_a_model_that_the_local_stack_does_not_serve_is_warned_about(
    address: str, router: ScriptedRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.cli.deploy.key.LOOK_S", 60.0)
    run_stack_here(address)
    assert main(["key", "new", "--tenant", "acme", "--models", "smol,Smoll"]) == 0
    output = capsys.readouterr()
    assert "[[key]]" in output.out
    assert "warning: the local stack serves no model 'Smoll'; did you mean 'smol'?" in output.err
    assert main(["key", "new", "--tenant", "acme", "--models", "smol"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_key_without_a_stack_is_made_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "--tenant", "acme", "--models", "any"]) == 0
    assert "warning" not in capsys.readouterr().err
