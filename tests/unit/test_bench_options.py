"""The command line of the benchmark, and the stacks that it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.bench.comparison import stacks
from inflight.bench.comparison.options import parse_options
from inflight.bench.comparison.stacks import engine_driver, peer_driver, stack_options, usable_cores
from inflight.bench.peers.driver import context_tokens
from inflight.bench.targets.model import LocalModel
from inflight.bench.workloads.generate import build_workload


def test_defaults_compare_both_modes_on_mixed() -> None:
    options = parse_options([])
    assert (options.workloads, options.modes, options.rounds, options.seats) == (
        ("mixed",),
        ("inflight", "static"),
        2,
        8,
    )


def test_lists_are_split_at_commas() -> None:
    options = parse_options(["--workload", "short, long", "--modes", "static", "--out", "elsewhere"])
    assert (options.workloads, options.modes, options.out) == (("short", "long"), ("static",), Path("elsewhere"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--workload", "huge"], "argument --workload: 'huge' is not one of mixed, short, long, prefill, chat"),
        (["--modes", "dynamic"], "argument --modes: 'dynamic' is not one of inflight, static, inflight-vllm, engine"),
        (["--scale", "0"], "argument --scale: '0' is not a number in (0, 1]"),
        (["--scale", "nan"], "argument --scale: 'nan' is not a number in (0, 1]"),
        (["--rounds", "0"], "argument --rounds: '0' is not a whole number of at least 1"),
        (["--workload", "gone.json"], "argument --workload: there is no file gone.json"),
        (
            ["--modes", "inflight,turbo"],
            "argument --modes: 'turbo' is not one of inflight, static, inflight-vllm, engine",
        ),
        (["--peer", "sglang"], "argument --peer: 'sglang' is not one of vllm, llama"),
        (["--peer", "vllm:fast"], "argument --peer: 'fast' is not one of vllm's compiled, eager"),
        (["--rate", "2", "--concurrency", "4"], "argument --rate: an open and a closed loop exclude each other"),
        (["--turns", "2"], "argument --turns: wants --concurrency"),
        (["--variant", "int8"], "argument --variant: 'int8' is not NAME=FLAGS"),
        (["--variant", "a-b=--x 1"], "argument --variant: 'a-b=--x 1' is not NAME=FLAGS"),
        (["--rate", "-1"], "argument --rate: '-1' is not a number above 0"),
        (["--slo-ttft-ms", "soon"], "argument --slo-ttft-ms: 'soon' is not a number above 0"),
        (["--address", "h:1", "--peer", "vllm"], "argument --address: a router elsewhere cannot be compared"),
        (["--address", "h:1", "--engine-only"], "argument --address: a router elsewhere cannot be compared"),
    ],
)
def test_wrong_option_is_named(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_stacks_differ_in_the_mode_alone_and_hold_every_seat() -> None:
    options = parse_options(["--seats", "16", "--workload", "mixed,long"])
    inflight, static = (stack_options(options, mode) for mode in options.modes)
    flags = dict(zip(inflight.executor_args[::2], inflight.executor_args[1::2], strict=True))
    longest = max(build_workload(name, vocabulary_size=10).max_request_tokens for name in options.workloads)
    assert flags["--batching"] == "inflight"
    assert int(flags["--max-tokens-in-paged-kv-cache"]) >= 16 * longest
    assert tuple("static" if arg == "inflight" else arg for arg in inflight.executor_args) == static.executor_args
    assert inflight.run_dir != static.run_dir


def test_stack_over_vllm_has_the_seats_and_the_context_of_vllm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 8192}')
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(stacks, "local_model", lambda model: LocalModel("one", tmp_path, None, vocabulary_size=8))
    options = parse_options(["--modes", "inflight-vllm", "--peer", "vllm:serve", "--seats", "4"])
    assert (options.stack_modes, [peer.mode for peer in options.peers]) == (("inflight-vllm",), ["vllm-serve"])
    stack = stack_options(options, "inflight-vllm")
    # Routers find the name of the model themselves, and it must be that of the executors.
    assert (stack.model, stack.executor_model) == (options.model, (str(tmp_path), "one"))
    assert stack.executor_args[:2] == ("--engine", "vllm")
    assert stack.executor_args[-2:] == ("--max-num-sequences", "4")
    setup = peer_driver(options, options.peers[0], LocalModel("one", tmp_path, None, 8)).setup
    assert stack.executor_args[2] == f"--engine-args=--dtype bfloat16 --max-model-len {context_tokens(setup)}"
    program = stack.executor_program or ()
    assert program[0] == "env"
    assert f"VLLM_CPU_OMP_THREADS_BIND={','.join(map(str, usable_cores()))}" in program


def test_engine_alone_and_peers_take_the_place_of_modes() -> None:
    options = parse_options(["--engine-only", "--peer", "vllm", "--peer", "llama:q4_0", "--peer", "vllm"])
    assert (options.modes, options.stack_modes) == (("engine",), ())
    assert [peer.mode for peer in options.peers] == ["vllm", "llama-q4_0"]


def test_report_of_several_workloads_is_named_after_all_of_them() -> None:
    assert parse_options(["--workload", "short,long"]).name == "short-long"
    assert parse_options(["--workload", "short,long", "--name", "both"]).name == "both"


def test_flags_for_executors_come_after_ours_so_that_they_win() -> None:
    options = parse_options(["--executor-args", "--dtype float32 --max-num-sequences 4"])
    assert stack_options(options, "inflight").executor_args[-4:] == ("--dtype", "float32", "--max-num-sequences", "4")


def test_engine_alone_gets_what_the_executor_of_a_stack_gets() -> None:
    options = parse_options(["--modes", "inflight,engine", "--seats", "4"])
    assert engine_driver(options).setup.arguments == stack_options(options, "inflight").executor_args


def test_variant_is_every_mode_of_ours_with_its_flags_last() -> None:
    options = parse_options(
        [
            "--modes",
            "inflight,engine",
            "--variant",
            "int8=--weight-dtype int8",
            "--stream-interval",
            "1,8",
            "--peer",
            "vllm",
        ]
    )
    plain, int8 = engine_driver(options), engine_driver(options, options.variants[0])
    assert (plain.mode, int8.mode) == ("engine", "engine-int8")
    assert int8.setup.arguments == (*plain.setup.arguments, "--weight-dtype", "int8")
    assert stack_options(options, "inflight", options.variants[0]).executor_args == int8.setup.arguments
    assert options.num_targets == 7, "per variant a stack at two intervals and an engine; and a peer"


def test_turns_follow_the_number_under_way() -> None:
    options = parse_options(["--concurrency", "1,8", "--turns", "3"])
    assert [(load.arrivals.concurrency, load.num_requests) for load in options.loads()] == [(1, 3), (8, 24)]
    assert options.num_requests == 24, "the longest of all requests has to fit"
    assert parse_options([]).loads() == [parse_options([])]


def test_peer_gets_as_many_seats_and_cores_and_room_for_the_longest_request() -> None:
    options = parse_options(["--peer", "vllm", "--seats", "4", "--workload", "long"])
    model = LocalModel("one", Path("/models/one"), Path("/models/one.gguf"), vocabulary_size=1)
    driver = peer_driver(options, options.peers[0], model)
    assert (driver.setup.seats, driver.setup.model, driver.setup.variant) == (4, "/models/one", "compiled")
    assert driver.setup.max_request_tokens == build_workload("long", vocabulary_size=1).max_request_tokens
    assert driver.environment["OMP_NUM_THREADS"] == str(len(usable_cores()))


def test_peer_that_reads_gguf_files_gets_the_file_and_the_folder_where_there_is_none() -> None:
    options = parse_options(["--peer", "llama"])
    folder, file = Path("/models/one"), Path("/models/one.gguf")
    for gguf_file, given in ((file, file), (None, folder)):
        model = LocalModel("one", folder, gguf_file, vocabulary_size=1)
        drivers = [peer_driver(options, peer, model) for peer in options.peers]
        assert [driver.setup.model for driver in drivers] == [str(given)] * 2
        assert [driver.mode for driver in drivers] == ["llama-file", "llama-q4_0"]
