"""Ranks of an executor: their messages, who may join, and which failure counts."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.common.model_source import ModelError
from inflight.common.settings import SettingError
from inflight.executor.checkpoint.shards import Shard
from inflight.executor.cpu.decoder import ExchangeError
from inflight.executor.entry import devices_from
from inflight.executor.native.library import NativeLibrary, load_native
from inflight.executor.parallel.exchange import SharedMemory
from inflight.executor.parallel.leader import GroupSettings, WorkerGroup
from inflight.executor.parallel.member import Hello
from inflight.executor.parallel.messages import (
    Connection,
    ConnectionEnded,
    Kind,
    Want,
    pack_step,
    pack_swaps,
    unpack_step,
    unpack_swaps,
)
from inflight.executor.ranks import check_devices, check_parallel, threads_per_rank
from inflight.executor.settings import ExecutorSettings
from tests.support.device.paged_cases import Spec, make_case

SAME = {"version": "1", "model": "abc", "number of ranks": "3"}
OWN = Hello(0, SAME, "here", 100)


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    """Two workers are to come."""
    group = WorkerGroup(GroupSettings(3, "127.0.0.1:0", 5.0, 64))
    yield group
    group.close()


@pytest.fixture
def joining(group: WorkerGroup) -> Iterator[Future[Any]]:
    """The leader waits for its workers."""
    threads = ThreadPoolExecutor(1)
    yield threads.submit(group.join, OWN)
    group.close()
    threads.shutdown()


def connect(group: WorkerGroup) -> Connection:
    host, _, port = group.address.rpartition(":")
    return Connection(socket.create_connection((host, int(port)), timeout=60))


def refusal(group: WorkerGroup, hello: dict[str, Any]) -> str:
    """What a worker is told that the leader does not let join."""
    connection = connect(group)
    connection.send_json(Kind.HELLO, hello)
    kind, content = connection.receive(10)
    connection.close()
    assert kind is Kind.REFUSED
    return content.decode()


def test_step_arrives_as_it_was_sent() -> None:
    batch = make_case([Spec(1, 20), Spec(1, 5), Spec(9, 30)], 16).batch
    batch.token_ids.copy_(torch.arange(batch.num_tokens))
    want, found = unpack_step(pack_step(batch, Want.LARGEST))
    assert want is Want.LARGEST
    for name in ("token_ids", "positions", "slot_mapping", "query_starts", "context_lengths", "logit_rows"):
        assert torch.equal(getattr(found, name), getattr(batch, name)), name
    assert (found.num_decodes, found.block_size) == (batch.num_decodes, batch.block_size)
    tables = batch.block_tables[batch.table_rows.long(), : batch.num_blocks]
    assert torch.equal(found.block_tables[found.table_rows.long()], tables)


def test_step_with_adapters_and_windows_arrives_as_it_was_sent() -> None:
    batch = make_case([Spec(1, 20), Spec(9, 30)], 16).batch
    slots = torch.tensor([-1, 3], dtype=torch.int32)
    windows: dict[str, Any] = {"window_tables": batch.block_tables + 7, "window_slots": batch.slot_mapping + 112}
    found = unpack_step(pack_step(replace(batch, adapter_slots=slots, **windows), Want.LOGITS))[1]
    assert found.adapter_slots is not None
    assert torch.equal(found.adapter_slots, slots)
    assert torch.equal(found.block_tables, batch.block_tables[batch.table_rows.long(), : batch.num_blocks])
    assert torch.equal(found.for_windows.block_tables, found.block_tables + 7)
    assert torch.equal(found.for_windows.slot_mapping, found.slot_mapping + 112)
    plain = unpack_step(pack_step(batch, Want.LOGITS))[1]
    assert plain.adapter_slots is None
    assert plain.for_windows is plain


def test_copies_of_a_host_tier_arrive_as_they_were_sent() -> None:
    swaps = (((1, 0), (5, 2)), ((3, 4),))
    assert unpack_swaps(pack_swaps(*swaps)) == swaps
    assert unpack_swaps(pack_swaps((), ())) == ((), ())


def test_connection_that_carries_no_messages_of_ranks_is_recognized() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection.__new__(Connection)
    connection._socket, connection._sending = ours, threading.Lock()
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ConnectionEnded, match="no message"):
        connection.receive(10)
    theirs.close()
    connection.close()


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"same": SAME | {"version": "2"}}, "its version is 2 and the leader's is 1"),
        ({"same": SAME | {"model": "xyz"}}, "its model is xyz and the leader's is abc"),
        ({"same": {"version": "1"}}, "its model is unknown and the leader's is abc; its number of ranks is unknown"),
        ({"rank": 3}, "rank 3 is not one of 1 to 2"),
        ({"rank": 0}, "rank 0 is not one of 1 to 2"),
    ],
)
def test_worker_that_differs_is_refused_with_the_reason(
    group: WorkerGroup, changes: dict[str, Any], reason: str
) -> None:
    assert refusal(group, Hello(1, SAME, "there", 50).fields() | changes).startswith(reason)


@pytest.mark.usefixtures("joining")
def test_second_worker_of_a_rank_is_refused(group: WorkerGroup) -> None:
    # Each connection has a thread of its own, so either may be the first.
    workers = [connect(group), connect(group)]
    for worker in workers:
        worker.send_json(Kind.HELLO, Hello(1, SAME, "there", 50).fields())
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker._socket, selectors.EVENT_READ, worker)
        ((refused, _),) = selector.select(60)
    assert refused.data.receive(60) == (Kind.REFUSED, b"there is a rank 1 already")
    assert [hello.rank for hello in group.hellos.values()] == [0, 1]
    for worker in workers:
        worker.close()


def test_worker_that_cannot_load_its_shard_ends_the_start(group: WorkerGroup, joining: Future[Any]) -> None:
    connection = connect(group)
    connection.send(Kind.FAILED, b"ModelError: a shard is truncated")
    with pytest.raises(ModelError, match="a shard is truncated"):
        joining.result(60)
    connection.close()


def test_strangers_do_not_disturb_the_start(group: WorkerGroup, joining: Future[Any]) -> None:
    for content in (b"GET / HTTP/1.1\r\n\r\n", b"", b"iftp\xff\x00\x00\x00\x00", b"iftp\x01\x00\x00\x00\x02{}"):
        with socket.create_connection(tuple_of(group.address)) as stranger:
            stranger.sendall(content)
    assert refusal(group, Hello(5, SAME, "there", 50).fields()) == "rank 5 is not one of 1 to 2"
    assert not joining.done()


def test_only_the_first_failure_counts_and_is_told_once(group: WorkerGroup) -> None:
    told: list[None] = []
    group.watch(lambda: told.append(None))
    group.fail("rank 2: out of memory")
    group.fail("rank 0: an exchange took too long")
    assert group.cause("something else") == "rank 2: out of memory"
    assert len(told) == 1


def test_memory_for_each_rank_is_the_least_of_any_machine(group: WorkerGroup) -> None:
    group.hellos |= {0: OWN, 1: Hello(1, SAME, "here", 90), 2: Hello(2, SAME, "there", 60)}
    assert group.free_bytes_per_rank == 45


def test_adapter_is_loaded_when_every_rank_has_answered(group: WorkerGroup) -> None:
    group._connections = {1: object(), 2: object()}  # type: ignore[dict-item]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(group.wait_for_adapter)
        group._adapter_replies.put("rank 2: its files differ from those of the leader")
        assert not waiting.done()
        group._adapter_replies.put("")
        assert waiting.result(30) == ["rank 2: its files differ from those of the leader"]
    group._connections = {}


def test_failure_of_a_rank_ends_the_wait_for_an_adapter(group: WorkerGroup) -> None:
    group._connections = {1: object(), 2: object()}  # type: ignore[dict-item]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(group.wait_for_adapter)
        group.fail("rank 1: its process was ended by signal 9")
        assert waiting.result(30) == ["a rank has failed: rank 1: its process was ended by signal 9"]
        # And that for another one, which begins before the executor has ended
        later = threads.submit(group.wait_for_adapter)
        assert later.result(30) == waiting.result()
    group._connections = {}


def test_memory_of_adapters_is_not_free_for_the_kv_pool(group: WorkerGroup) -> None:
    group.hellos |= {0: OWN, 1: Hello(1, SAME, "there", 90)}
    group.reserved_bytes = 30
    assert group.free_bytes_per_rank == 60


def shared(num_ranks: int, timeout_s: float) -> list[SharedMemory]:
    library = load_native()
    assert isinstance(library, NativeLibrary)
    fd = os.memfd_create("test")
    os.ftruncate(fd, SharedMemory.num_bytes(num_ranks, 64, 64))
    return [SharedMemory(fd, Shard(rank, num_ranks), library, 64, 64, timeout_s) for rank in range(num_ranks)]


def test_results_in_shared_memory_are_those_of_each_rank() -> None:
    ranks = shared(3, 60.0)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda rank: ranks[rank].gather(torch.full((2, 3), float(rank))), range(3)))
    assert [part.unique().tolist() for part in found[0]] == [[0.0], [1.0], [2.0]]
    assert found[1:] == [[], []]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_step_without_tokens_has_empty_results_in_shared_memory(shape: tuple[int, int]) -> None:
    ranks = shared(2, 60.0)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: ranks[rank].gather(torch.empty(shape)), range(2)))
    assert [part.shape for part in found[0]] == [shape, shape]
    assert found[1] == []


def test_missing_rank_ends_the_wait_when_it_is_given_up() -> None:
    ranks = shared(2, 60.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks[0].gather, torch.zeros(4))
        ranks[0].abandon()
        with pytest.raises(ExchangeError):
            waiting.result(30)


def test_missing_rank_ends_the_wait_after_the_timeout() -> None:
    with pytest.raises(ExchangeError):
        shared(2, 0.01)[0].gather(torch.zeros(4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_rank": 2, "tensor_parallel_leader": "a:1"}, ("tensor_parallel_rank=2", "size=2")),
        ({"tensor_parallel_rank": 1}, ("tensor_parallel_rank", "tensor_parallel_leader")),
        ({"tensor_parallel_leader": "a:1"}, ("tensor_parallel_rank", "tensor_parallel_leader")),
        ({"tensor_parallel_listen": "nowhere"}, ("tensor_parallel_listen=nowhere", "host:port")),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    settings = ExecutorSettings(insecure=True, tensor_parallel_size=2, **changes)
    with pytest.raises(SettingError) as error:
        check_parallel(settings)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "num_gpus", "words"),
    [
        ({}, 1, "tensor_parallel_size=2 needs a GPU for each rank from device_index=0 on, and torch finds 1"),
        ({"weight_dtype": "fp8"}, 2, "weight_dtype=fp8 does not go with tensor_parallel_size=2 on GPUs"),
        ({"kv_cache_dtype": "fp8"}, 2, "kv_cache_dtype=fp8 does not go"),
        ({"speculation": "ngram"}, 2, "speculation=ngram does not go"),
        ({"adapter_folder": Path("a")}, 2, "adapter_folder=a does not go"),
        ({"attention_backend": "flashinfer"}, 2, "attention_backend=flashinfer does not go"),
        ({"kv_cache_host_memory_bytes": 1}, 2, "kv_cache_host_memory_bytes=1 does not go"),
        ({"device_index": 5}, 0, "device_index=5: torch finds no such GPU"),
    ],
)
def test_ranks_that_cannot_run_on_gpus_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], num_gpus: int, words: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    settings = ExecutorSettings(insecure=True, tensor_parallel_size=2, **changes)
    with pytest.raises(SettingError, match=words):
        check_devices(settings)


def test_ranks_need_a_gpu_each_only_where_they_are_on_gpus_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_devices(ExecutorSettings(insecure=True, tensor_parallel_size=2))
    check_devices(ExecutorSettings(insecure=True, tensor_parallel_size=4, tensor_parallel_listen="10.0.0.1:1"))
    check_devices(ExecutorSettings(insecure=True, tensor_parallel_size=4, device="cpu", speculation="ngram"))


@pytest.mark.parametrize(
    ("first", "visible", "expected"), [(1, "4,5,6", "5,6"), (62, None, "62,63"), (2, "GPU-a,GPU-b", "")]
)
def test_gpus_before_the_chosen_one_are_hidden(first: int, visible: str | None, expected: str) -> None:
    assert devices_from(first, visible) == expected


def test_ranks_of_one_machine_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.executor.ranks.num_usable_cores", lambda: 8)

    def threads(**changes: Any) -> int:
        return threads_per_rank(ExecutorSettings(insecure=True, **changes))

    assert threads() == 8
    assert threads(tensor_parallel_size=4) == 2
    assert threads(tensor_parallel_size=16) == 1
    assert threads(tensor_parallel_size=4, tensor_parallel_listen="0.0.0.0:1") == 8
    assert threads(tensor_parallel_size=4, num_threads=3) == 3


def test_hello_that_is_none_is_refused() -> None:
    wrong_rank = {"rank": "x", "same": {}, "host": "", "free_bytes": 0}
    contents: list[Any] = [{}, [], {"rank": 1, "same": []}, wrong_rank]
    for content in contents:
        with pytest.raises(ValueError, match=r"joined without|invalid literal"):
            Hello.parse(json.dumps(content).encode())


def tuple_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
