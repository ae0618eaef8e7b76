"""`inflight generate` and `inflight chat`: what they print, what they ask for, and how they fail."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from inflight.cli import main as cli
from inflight.cli.answer import write_note
from inflight.cli.main import main
from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.v1 import inference_pb2, types_pb2
from tests.unit.scripted_router import WORDS, ScriptedRouter, accepted, asked, delta, serving, speak

# --- generate


def test_generate_streams_the_text_and_sums_up_on_standard_error(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--address", address]) == 0
    output = capsys.readouterr()
    assert output.out == "The capital is Paris.\n"
    assert output.err.startswith("5 tokens in ")
    assert output.err.rstrip().endswith("stop token")


def test_generate_shows_how_to_ask_about_the_request_when_told(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--show-token", "--address", address]) == 0
    assert capsys.readouterr().err.startswith("INFLIGHT_RESUME_TOKEN=secret inflight explain r1\n5 tokens in ")
    assert main(["generate", "hi", "--show-token", "--json", "--address", address]) == 0
    assert json.loads(capsys.readouterr().out)["resume_token"] == "secret"


@pytest.mark.parametrize(
    ("flags", "constraint"),
    [
        (["--json-schema", ' {"type": "null"}'], {"json_schema": ' {"type": "null"}'}),
        (["--json-schema", "schema.json"], {"json_schema": "{}"}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "a", "--choice", "b"], {"choice": {"choices": ["a", "b"]}}),
        (["--grammar", "grammar.lark"], {"grammar": 'start: "a"'}),
        ([], None),
    ],
)
def test_generate_asks_for_a_form_of_the_output(
    flags: list[str], constraint: dict[str, Any] | None, address: str, router: ScriptedRouter, tmp_path: Path
) -> None:
    (tmp_path / "schema.json").write_text("{}")
    (tmp_path / "grammar.lark").write_text('start: "a"')
    flags = [str(tmp_path / flag) if flag.endswith((".json", ".lark")) else flag for flag in flags]
    assert main(["generate", "hi", "--address", address, *flags]) == 0
    (request,) = asked(router)
    assert request.HasField("constraint") is (constraint is not None)
    assert request.constraint == types_pb2.Constraint(**constraint or {})


def test_two_forms_or_a_file_that_is_not_there_are_errors_of_use(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--json-object", "--regex", "a"])
    assert "not allowed with" in capsys.readouterr().err
    assert main(["generate", "hi", "--address", address, "--json-schema", str(tmp_path / "none")]) == 2
    assert "--json-schema: No such file" in capsys.readouterr().err


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


def test_generate_prints_the_scores_of_the_prompt(
    address: str, router: ScriptedRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(token_id: int, logprob: float, rank: int) -> types_pb2.TokenLogprob:
        text = f"w{token_id}".encode()
        return types_pb2.TokenLogprob(token_id=token_id, logprob=logprob, text_bytes=text, rank=rank)

    scores = types_pb2.PositionLogprobs(chosen=named(7, -1.5, 2), top=[named(8, -0.5, 1)])
    logprobs = [types_pb2.PositionLogprobs(), scores]
    prompt = inference_pb2.Prompt(token_ids=[6, 7], logprobs=logprobs, first_text_bytes=b"w6")
    told = inference_pb2.StreamEvent(prompt=prompt)
    router.script = lambda request, context: iter([accepted(), told, *speak(WORDS)])
    flags = [
        "--raw",
        "--echo",
        "--stream-interval",
        "4",
        "--inter-token-target",
        "40",
        "--max-drafts",
        "0",
        "--prompt-logprobs",
        "1",
        "--address",
        address,
    ]
    assert main(["generate", "hi", *flags]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split() for line in lines[:2]] == [["'w6'"], ["-1.500", "2", "'w7'", "('w8'", "-0.500)"]]
    (request,) = asked(router)
    assert (request.output.echo, request.output.prompt_logprobs, request.output.top_prompt_logprobs) == (True, True, 1)
    assert (request.output.stream_interval, request.inter_token_target_ms) == (4, 40)
    assert request.HasField("max_drafts")
    assert request.max_drafts == 0
    assert main(["generate", "hi", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_logprobs"] == [
        {"token_id": 6},
        {
            "token_id": 7,
            "text": "w7",
            "logprob": -1.5,
            "rank": 2,
            "top": [{"token_id": 8, "text": "w8", "logprob": -0.5, "rank": 1}],
        },
    ]


def test_generate_passes_penalties_biases_and_bad_words_on(address: str, router: ScriptedRouter) -> None:
    flags = ["--min-p", "0.25", "--presence-penalty", "-1", "--frequency-penalty", "0.5", "--repetition-penalty", "1.5"]
    flags += ["--logit-bias", "5=-100", "--logit-bias", "7=2.5", "--allowed-token-ids", "5,7", "--bad-word", "a"]
    flags += ["--bad-word", "b c", "--no-repeat-ngram-size", "3", "--min-tokens", "4"]
    assert main(["generate", "hi", "--address", address, *flags]) == 0
    (request,) = asked(router)
    assert request.sampling == types_pb2.SamplingParams(
        min_p=0.25,
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias={5: -100, 7: 2.5},
        allowed_token_ids=[5, 7],
        bad_words=["a", "b c"],
        no_repeat_ngram_size=3,
    )
    assert request.stopping == types_pb2.StoppingParams(min_tokens=4)


@pytest.mark.parametrize(
    ("flag", "value", "error"),
    [
        ("--logit-bias", "5", "argument --logit-bias: '5' is not ID=BIAS"),
        ("--logit-bias", "x=1", "argument --logit-bias: 'x=1' is not ID=BIAS"),
        ("--allowed-token-ids", "1,,2", "argument --allowed-token-ids: '1,,2' is not a list of token ids"),
    ],
)
def test_flag_that_cannot_be_read_is_a_usage_error(
    flag: str, value: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "hi", flag, value])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {error}\n")


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


def test_unreachable_router_is_one_line_that_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--address", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no router answers at 127.0.0.1:1; `inflight up` starts one")
    assert error.count("\n") == 1


def test_a_bad_address_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--address", " x:1"]) == 2
    assert "not an address" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_generate_without_a_traceback(address: str) -> None:
    folder = Path(cli.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "inflight.cli.main", "generate", "hi", "--address", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as errors:
        assert "Traceback" not in errors.read()
    assert process.wait(60) == 1


# --- chat


class Interrupted(io.StringIO):
    """A terminal whose user presses Ctrl-C when the third piece of text appears."""

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
