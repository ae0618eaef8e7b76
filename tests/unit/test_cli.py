"""The command line against a scripted router: what it prints, what it asks for, and how it fails."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from inflight.v1 import inference_pb2, types_pb2

from client.cli import main as cli
from client.cli.address import DEFAULT_ADDRESS, add_address_flags, resolve_address
from client.cli.answer import write_note
from client.cli.main import COMMANDS, Command, main, usage
from client.cli.up import _parser as up_parser
from client.cli.up import stack_options
from client.stack.options import executor_command, router_command
from client.stack.state import StackState, write_state
from common.errors import FieldViolation, Reason, RequestError, invalid
from tests.unit.scripted_router import WORDS, ScriptedRouter, accepted, delta, seconds, serving, speak

NATIVE = [command.name for command in COMMANDS if command.run.startswith("client.")]


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def address(router: ScriptedRouter) -> Iterator[str]:
    with serving(router) as served:
        yield served


@pytest.fixture(autouse=True)
def _nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack and no address but the test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INFLIGHT_ADDRESS", raising=False)
    monkeypatch.delenv("INFLIGHT_RUN_DIR", raising=False)


def asked(router: ScriptedRouter) -> list[Any]:
    requests = []
    while True:
        try:
            requests.append(router.requests.get_nowait())
        except queue.Empty:
            return requests


# --- the table


@pytest.mark.parametrize("name", NATIVE)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: inflight {name}")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {command.name}" in output for command in COMMANDS)
    assert output.strip() == usage()


def test_no_command_and_a_wrong_one_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["genrate"]) == 2
    assert "no command 'genrate'" in capsys.readouterr().err


def test_a_wrong_flag_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["models", "--colour"])
    assert ended.value.code == 2


def test_a_command_whose_part_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (Command("fly", "fly", "nowhere.main:main"),))
    assert main(["fly"]) == 1
    assert capsys.readouterr().err == "error: this installation has no 'nowhere' part, which inflight fly needs\n"


def test_help_loads_no_server_and_no_model_library() -> None:
    program = (
        "import sys; from client.cli.main import main; main(['--help']);"
        "sys.exit(bool({'torch', 'transformers', 'redis', 'router.main', 'executor.main'} & set(sys.modules)))"
    )
    folder = Path(cli.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(folder / "protos" / "gen")))}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, stdout=subprocess.DEVNULL, timeout=60)


# --- the address


def address_of(*flags: str) -> str:
    return resolve_address(parse_address(flags), os.environ)


def parse_address(flags: tuple[str, ...]) -> Any:
    parser = argparse.ArgumentParser()
    add_address_flags(parser)
    return parser.parse_args(flags)


def test_the_address_is_flag_then_environment_then_running_stack_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert address_of() == DEFAULT_ADDRESS
    (tmp_path / "run").mkdir()
    write_state(tmp_path / "run", StackState(os.getpid(), "127.0.0.1:7", "redis://x", ()))
    assert address_of() == "127.0.0.1:7"
    monkeypatch.setenv("INFLIGHT_ADDRESS", "there:8")
    assert address_of() == "there:8"
    assert address_of("--address", "here:9") == "here:9"


def test_the_run_folder_is_flag_then_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_state(tmp_path / name, StackState(os.getpid(), f"{name}:1", "redis://x", ()))
    monkeypatch.setenv("INFLIGHT_RUN_DIR", "a")
    assert address_of() == "a:1"
    assert address_of("--run-dir", "b") == "b:1"


def test_a_broken_state_file_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for content in ("", "{", "[]", '{"pid": 1}'):
        (tmp_path / "run" / "state.json").write_text(content)
        assert address_of() == DEFAULT_ADDRESS


# --- generate


def test_generate_streams_the_text_and_sums_up_on_standard_error(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--address", address]) == 0
    output = capsys.readouterr()
    assert output.out == "The capital is Paris.\n"
    assert output.err.startswith("5 tokens in ")
    assert output.err.rstrip().endswith("stop token")


def test_generate_passes_its_flags_on(address: str, router: ScriptedRouter) -> None:
    sampling = ["--temperature", "0", "--top-p", "0.5", "--top-k", "3", "--seed", "7"]
    service = ["--tenant", "acme", "--priority", "batch", "--deadline", "1.5", "--first-token-deadline", "0.5"]
    sampling += [*service, "--session", "s", "--request-id", "mine"]
    flags = [*sampling, "--max-tokens", "9", "--stop", "a", "--stop", "b", "--model", "smol"]
    assert main(["generate", "hi", "--system", "be brief", "--address", address, *flags]) == 0
    (request,) = asked(router)
    assert [message.role for message in request.chat.messages] == ["system", "user"]
    assert request.sampling == types_pb2.SamplingParams(temperature=0, top_p=0.5, top_k=3, seed=7)
    assert request.stopping == types_pb2.StoppingParams(max_tokens=9, stop=["a", "b"])
    assert request.model == "smol"
    assert (request.tenant, request.session_id, request.request_id) == ("acme", "s", "mine")
    assert request.priority == types_pb2.PRIORITY_CLASS_BATCH
    assert request.deadlines.total.ToMilliseconds() == 1500
    assert request.deadlines.first_token.ToMilliseconds() == 500


def test_a_prompt_is_chat_where_the_model_has_a_template_and_text_where_not(
    address: str, router: ScriptedRouter
) -> None:
    main(["generate", "hi", "--address", address])
    main(["generate", "hi", "--raw", "--address", address])
    router.models[0].has_chat_template = False
    main(["generate", "hi", "--address", address])
    main(["generate", "hi", "--chat", "--address", address])
    assert [request.WhichOneof("prompt") for request in asked(router)] == ["chat", "text", "text", "chat"]


def test_a_prompt_may_come_from_standard_input(
    address: str, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert main(["generate", "--raw", "--address", address]) == 0
    assert asked(router)[0].text == "from a pipe"


def test_generate_json_is_one_object_with_everything(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--json", "--address", address]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert result["text"] == "The capital is Paris."
    assert result["finish_reason"] == "stop_token"
    assert result["usage"]["output_tokens"] == 5
    assert result["timing"]["queue_s"] == 0.25
    assert output.err == ""


def test_a_refusal_is_one_line_that_names_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Any:
        raise invalid(FieldViolation("sampling.temperature", "must be at least 0"))

    with serving(ScriptedRouter(script)) as address:
        assert main(["generate", "hi", "--temperature", "-1", "--address", address]) == 1
    assert capsys.readouterr().err == "error: INVALID_ARGUMENT: sampling.temperature: must be at least 0\n"


def test_a_value_that_cannot_be_sent_is_a_usage_error(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--max-tokens", "-1", "--address", address]) == 2
    assert capsys.readouterr().err.startswith("error: max_tokens: -1 is not allowed")


@pytest.mark.slow
def test_nobody_there_is_one_line_that_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--address", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no router answers at 127.0.0.1:1; `inflight up` starts one")
    assert error.count("\n") == 1


def test_a_bad_address_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--address", " x:1"]) == 2
    assert "not an address" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_generate_without_a_traceback(address: str) -> None:
    folder = Path(cli.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(folder / "protos" / "gen")))}
    command = [sys.executable, "-m", "client.cli.main", "generate", "hi", "--address", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as errors:
        assert "Traceback" not in errors.read()
    assert process.wait(20) == 1


# --- chat


class Interrupted(io.StringIO):
    """A terminal at which somebody presses Ctrl-C when the third piece of text appears."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue() == "on and on " * 3:
            # A real signal may reach Python while it collects garbage, which swallows the exception.
            raise KeyboardInterrupt
        return written


def test_chat_keeps_the_conversation_and_forgets_it_when_told(
    address: str, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\n/what\n/clear\nthree\n/exit\nfour\n"))
    assert main(["chat", "--system", "be brief", "--address", address]) == 0
    said = [[message.role for message in request.chat.messages] for request in asked(router)]
    assert said == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert capsys.readouterr().out.count("The capital is Paris.") == 3


def test_chat_outlives_a_refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refusals = iter([True, False])

    def script(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Any:
        if next(refusals):
            raise invalid(FieldViolation("chat", "too long"))
        yield from speak(WORDS)

    router = ScriptedRouter(script)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    with serving(router) as address:
        assert main(["chat", "--address", address]) == 0
    output = capsys.readouterr()
    assert "error: INVALID_ARGUMENT: chat: too long" in output.err
    assert "The capital is Paris." in output.out
    assert [len(request.chat.messages) for request in asked(router)] == [1, 1]


def test_ctrl_c_ends_the_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Any:
        if len(request.chat.messages) > 1:
            yield from speak(WORDS)
            return
        yield accepted()
        for offset in itertools.count():
            if not context.is_active():
                return
            yield delta("on and on ", offset)

    router = ScriptedRouter(script)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    monkeypatch.setattr(sys, "stdout", Interrupted())
    with serving(router) as address:
        assert main(["chat", "--address", address]) == 0
    first, second = asked(router)
    assert len(first.chat.messages) == 1
    assert [message.role for message in second.chat.messages] == ["user", "assistant", "user"]


def test_a_resumed_answer_is_whole_with_a_note_on_the_side(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Any:
        yield accepted()
        yield delta(WORDS[0], 0)
        raise RequestError(Reason.DRAINING, "goes away")

    def resumes(request: inference_pb2.ResumeRequest, context: grpc.ServicerContext) -> Any:
        yield from itertools.islice(speak(WORDS), 3, None)

    with serving(ScriptedRouter(breaks, resumes)) as address:
        assert main(["generate", "hi", "--raw", "--address", address]) == 0
    output = capsys.readouterr()
    assert output.out == "The capital is Paris.\n"
    assert output.err.startswith("connection lost; resumed\n5 tokens in ")


def test_a_note_is_dim_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    notes = Terminal()
    write_note(notes, "resumed")
    assert notes.getvalue() == "\n\x1b[2mresumed\x1b[0m\n"


# --- models and status


def test_models_are_listed(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--address", address]) == 0
    assert "smol" in capsys.readouterr().out
    assert main(["models", "--json", "--address", address]) == 0
    assert json.loads(capsys.readouterr().out)[0]["context_length"] == 2048


@pytest.mark.parametrize("name", ["status", "capacity"])
def test_status_shows_seats_blocks_and_queues(
    name: str, address: str, router: ScriptedRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    router.capacity = inference_pb2.GetCapacityResponse(
        executors=[
            inference_pb2.ExecutorCapacity(
                executor_id="e0", accepting=True, seats_used=3, seats_total=4, blocks_used=17, blocks_total=64
            ),
            inference_pb2.ExecutorCapacity(executor_id="e1"),
        ],
        queues=[inference_pb2.QueueDepth(model="smol", priority=types_pb2.PRIORITY_CLASS_BATCH, num_requests=5)],
    )
    assert main([name, "--address", address]) == 0
    output = capsys.readouterr().out
    assert all(text in output for text in ("3/4", "17/64", "e1, takes nothing new", "5 batch for smol"))


def test_status_of_an_empty_pool_says_so(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", address]) == 0
    assert capsys.readouterr().out == "no executor\nnothing waits\n"
    assert main(["status", "--json", "--address", address]) == 0
    assert json.loads(capsys.readouterr().out) == {"executors": [], "queues": [], "variants": [], "estimates": []}


def test_status_shows_policy_preemptions_constraint_and_variants(
    address: str, router: ScriptedRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    router.capacity = inference_pb2.GetCapacityResponse(
        executors=[
            inference_pb2.ExecutorCapacity(
                executor_id="e0",
                accepting=True,
                scheduler_policy=types_pb2.SCHEDULER_POLICY_MAX_UTILIZATION,
                reserve_quantile=0.95,
                num_preemptions=1234,
                constraint=types_pb2.STEP_CONSTRAINT_STATIC_BATCH,
                bounds=[types_pb2.StepBound(constraint=types_pb2.STEP_CONSTRAINT_SEATS, num_steps=7)],
            )
        ],
        variants=[
            inference_pb2.VariantCapacity(model="smol", variant="smol-static", share=0.1, num_requests=5, ttft_p50_ms=8)
        ],
        estimates=[inference_pb2.EstimateQuality(model="smol", num_estimates=3, mean_error=0.5, correction=1.5)],
    )
    assert main(["status", "--address", address]) == 0
    output = capsys.readouterr().out
    assert all(text in output for text in ("p95", "1234", "static batch", "smol-static", "10%", "8.0"))
    assert main(["status", "--json", "--address", address]) == 0
    capacity = json.loads(capsys.readouterr().out)
    assert capacity["executors"][0]["bounds"] == {"seats": 7}
    assert capacity["variants"][0]["ttft_p99_ms"] is None
    assert capacity["estimates"][0]["correction"] == 1.5


# --- explain


def test_explain_says_what_a_request_waits_for(
    address: str, router: ScriptedRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router.standing = inference_pb2.GetRequestResponse(
        state=inference_pb2.REQUEST_STATE_WAITING,
        position=3,
        waiting_for="waits for a seat",
        wait_reason=inference_pb2.WAIT_REASON_SEAT,
        estimated_wait=seconds(2.5),
        priority=types_pb2.PRIORITY_CLASS_BATCH,
    )
    assert main(["explain", "mine", "--model", "smol", "--address", address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine: waiting",
        "  waits for a seat",
        "  ahead of it: 3, in class batch",
        "  estimated wait: about 2.5 s",
    ]
    assert asked(router) == [inference_pb2.GetRequestRequest(request_id="mine", model="smol")]


def test_explain_of_a_placed_request_names_executor_variant_and_constraint(
    address: str, router: ScriptedRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    router.standing = inference_pb2.GetRequestResponse(
        state=inference_pb2.REQUEST_STATE_PLACED,
        executor_id="e0",
        output_tokens=9,
        variant="smol-static",
        step_constraint=types_pb2.STEP_CONSTRAINT_STATIC_BATCH,
    )
    assert main(["explain", "mine", "--address", address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "mine: on e0 by smol-static",
        "  9 tokens so far",
        "  newest step of its executor was bound by: static batch",
    ]
    assert main(["explain", "mine", "--json", "--address", address]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "placed"


def test_status_watch_goes_on_until_ctrl_c(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def wait(interval_s: float) -> None:
        waits.append(interval_s)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("client.cli.status.time.sleep", wait)
    assert main(["status", "--watch", "0.5", "--address", address]) == 130
    assert waits == [0.5] * 3
    assert "nothing waits" in capsys.readouterr().out


def test_status_refuses_a_silly_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch", "0"]) == 2
    assert "--watch" in capsys.readouterr().err


# --- up


def test_up_turns_its_flags_into_the_servers_flags() -> None:
    flags = ["--executors", "2", "--model", "m", "--port", "5000", "--batching", "static", "--max-num-sequences", "4"]
    options = stack_options(up_parser().parse_args([*flags, "--executor-args", "--num-threads 1"]))
    assert (options.executors, options.routers, options.port) == (2, 1, 5000)
    command = executor_command(options, "executor-0", "127.0.0.1:1")
    assert command[: len(options.program) + 3] == [*options.program, "executor", "--listen", "127.0.0.1:1"]
    # The user's come last, so that they win over what the stack chooses.
    assert command[-8:] == [*("--model", "m", "--batching", "static", "--max-num-sequences", "4", "--num-threads", "1")]
    command = router_command(options, "router-0", "127.0.0.1:2", ("127.0.0.1:1", "127.0.0.1:3"))
    assert command[command.index("--executors") + 1] == "127.0.0.1:1,127.0.0.1:3"


def test_up_passes_the_routers_flags_on() -> None:
    flags = ["--admission-file", "a.toml", "--max-queue-requests", "7", "--router-args", "--age-s 5"]
    options = stack_options(up_parser().parse_args(flags))
    command = router_command(options, "router-0", "127.0.0.1:2", ("127.0.0.1:1",))
    assert command[-6:] == [*("--admission-file", "a.toml", "--max-queue-requests", "7", "--age-s", "5")]


@pytest.mark.parametrize(
    ("flags", "named"), [("--executors 0", "executors"), ("--routers -1", "routers"), ("--port 0", "port")]
)
def test_up_refuses_a_bad_number_by_name(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {named} must be")


def test_demo_refuses_a_bad_number_of_seats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seats", "0"]) == 2
    assert "--seats" in capsys.readouterr().err


# --- cancel and explain


@pytest.mark.parametrize("name", ["cancel", "explain"])
def test_a_request_of_somebody_elses_is_named_with_its_token_and_tenant(
    name: str, address: str, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    whose = ["--tenant", "acme", "--model", "smol", "--address", address]
    assert main([name, "r7", "--resume-token", "secret", *whose]) == 0
    monkeypatch.setenv("INFLIGHT_RESUME_TOKEN", "secret")
    assert main([name, "r7", *whose]) == 0
    first, second = asked(router)
    assert first == second
    assert (first.request_id, first.resume_token, first.tenant, first.model) == ("r7", "secret", "acme", "smol")


def test_cancel_says_where_the_request_was(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cancel", "r7", "--address", address]) == 0
    assert capsys.readouterr().out == "r7: ends; it was placed\n"
