"""Messages between the leader of a tensor-parallel executor and its workers, over one TCP connection to each worker.

    worker → leader   HELLO (JSON, once its shard is loaded), ALIVE (at intervals), FAILED (text), ADAPTER_LOADED (text)
    leader → worker   WELCOME (JSON) or REFUSED (text); then ALIVE (at intervals), and RESERVE_ADAPTERS, RESERVE_STATES,
                      ALLOCATE, HOST_TIER and HOST_SLOTS (JSON), STEP, SWAP and SWAP_STATES in the order in which they
                      are to be executed; LOAD_ADAPTER (JSON), which is executed beside steps and answered with
                      ADAPTER_LOADED: why it failed, or ""; on GPUs MEASURE, RUNNER, UPLOAD and LAUNCH
                      (`device_messages`), in the order of execution, too

A step is packed as arrays: first their sizes, then token ids, positions, slots and so on as in `StepBatch`, with only
the block tables that it reads.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.executor.attention.gpu_host_tier import Pairs
from inflight.executor.scheduler.sequence import StateLoad
from inflight.executor.step.batch import SavedState, StateRows, StepBatch

HEADER = struct.Struct("!4sBI")
# The first bytes of every message, so that other programs' connections are recognized.
MAGIC = b"iftp"
MAX_MESSAGE_BYTES = 1 << 30
NUM_STEP_SIZES = 12
# Numbers of a state that is loaded or saved.
STATE_NUMBERS = 3


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    ALIVE = 4
    FAILED = 5
    ALLOCATE = 6
    HOST_TIER = 7
    STEP = 8
    SWAP = 9
    RESERVE_ADAPTERS = 10
    LOAD_ADAPTER = 11
    ADAPTER_LOADED = 12
    MEASURE = 13
    RUNNER = 14
    UPLOAD = 15
    LAUNCH = 16
    RESERVE_STATES = 17
    HOST_SLOTS = 18
    SWAP_STATES = 19


class Want(IntEnum):
    """What a step yields: all logits of the rows, or of each row the largest and its id."""

    LOGITS = 0
    LARGEST = 1


class ConnectionEnded(Exception):
    """The other side has closed the connection, or sent what is no message."""


class Connection:
    """A socket that carries messages. Several threads may send, and one receives."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Sends a message. Raises `OSError`."""
        with self._sending:
            self._socket.sendall(HEADER.pack(MAGIC, kind, len(content)) + content)

    def send_json(self, kind: Kind, content: Mapping[str, Any]) -> None:
        """Sends a message with a JSON object."""
        self.send(kind, json.dumps(content).encode())

    def receive(self, timeout_s: float | None = None) -> tuple[Kind, bytes]:
        """Waits for a message. Raises `TimeoutError` if nothing comes for `timeout_s`."""
        self._socket.settimeout(timeout_s)
        magic, kind, length = HEADER.unpack(self._read(HEADER.size))
        if magic != MAGIC or length > MAX_MESSAGE_BYTES:
            raise ConnectionEnded("it sent what is no message of a rank")
        return Kind(kind), self._read(length)

    def close(self) -> None:
        """Ends the connection, also for a thread that waits for a message."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            received = self._socket.recv(count - len(content))
            if not received:
                raise ConnectionEnded("it closed the connection")
            content += received
        return bytes(content)


def pack_step(batch: StepBatch, want: Want) -> bytes:
    """Returns a step as a message. Its tokens must be known."""
    tables = _tables_read(batch)
    arrays = [
        *(batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows),
        *(batch.query_starts, batch.context_lengths, tables),
    ]
    if batch.adapter_slots is not None:
        arrays.append(batch.adapter_slots)
    windows = batch.for_windows
    if has_windows := windows is not batch:
        arrays += [windows.slot_mapping, _tables_read(windows)]
    loads: tuple[StateLoad, ...] = ()
    saves: tuple[SavedState, ...] = ()
    if batch.states is not None:
        loads, saves = batch.states.loads, batch.states.saves
        arrays += [batch.states.slots, torch.tensor([*loads, *saves], dtype=torch.int64)]
    sizes = np.array(
        [
            *(want, batch.num_tokens, batch.num_sequences, batch.logit_rows.shape[0]),
            *(tables.shape[1], batch.block_size, batch.num_decodes),
            *(batch.adapter_slots is not None, has_windows),
            *(batch.states is not None, len(loads), len(saves)),
        ],
        np.int64,
    )
    return b"".join((sizes.tobytes(), *(array.numpy().tobytes() for array in arrays)))


def unpack_step(content: bytes) -> tuple[Want, StepBatch]:
    """Returns the step of a message."""
    sizes = np.frombuffer(content, np.int64, NUM_STEP_SIZES).tolist()
    want, num_tokens, num_sequences, num_logits, num_blocks, block_size, num_decodes, *others = sizes
    has_adapters, has_windows, has_states, num_loads, num_saves = others
    cursor = _Cursor(content, NUM_STEP_SIZES * 8)
    token_ids, positions, slots = (cursor.take(np.int64, num_tokens) for _ in range(3))
    logit_rows = cursor.take(np.int64, num_logits)
    query_starts = cursor.take(np.int32, num_sequences + 1)
    context_lengths = cursor.take(np.int32, num_sequences)
    tables = cursor.take(np.int32, num_sequences * num_blocks).view(num_sequences, num_blocks)
    adapter_slots = cursor.take(np.int32, num_sequences) if has_adapters else None
    window_slots = cursor.take(np.int64, num_tokens) if has_windows else None
    window_tables = cursor.take(np.int32, num_sequences * num_blocks).view(tables.shape) if has_windows else None
    states = None
    if has_states:
        slots_of_states = cursor.take(np.int64, num_sequences)
        loads, saves = (
            cursor.take(np.int64, count * STATE_NUMBERS).view(-1, STATE_NUMBERS).tolist()
            for count in (num_loads, num_saves)
        )
        states = StateRows(
            slots_of_states, tuple(StateLoad(*load) for load in loads), tuple(SavedState(*save) for save in saves)
        )
    none = torch.zeros(0, dtype=torch.int64)
    return Want(want), StepBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_starts=query_starts,
        context_lengths=context_lengths,
        block_tables=tables,
        table_rows=torch.arange(num_sequences, dtype=torch.int32),
        logit_rows=logit_rows,
        carried_rows=none,
        carried_from=none,
        num_decodes=num_decodes,
        block_size=block_size,
        adapter_slots=adapter_slots,
        window_tables=window_tables,
        window_slots=window_slots,
        states=states,
    )


def _tables_read(batch: StepBatch) -> Tensor:
    """Returns the part of the block tables that a step reads."""
    return batch.block_tables[batch.table_rows.long(), : batch.num_blocks].contiguous()


def pack_swaps(swaps_out: Pairs, swaps_in: Pairs) -> bytes:
    """Returns the copies of a host tier as a message."""
    pairs = np.array([*swaps_out, *swaps_in], np.int64).reshape(-1, 2)
    return np.array([len(swaps_out)], np.int64).tobytes() + pairs.tobytes()


def unpack_swaps(content: bytes) -> tuple[Pairs, Pairs]:
    """Returns the copies of a message."""
    numbers = np.frombuffer(content, np.int64)
    pairs = tuple((int(source), int(target)) for source, target in numbers[1:].reshape(-1, 2))
    return pairs[: numbers[0]], pairs[numbers[0] :]


class _Cursor:
    def __init__(self, content: bytes, offset: int) -> None:
        self._content, self._offset = content, offset

    def take(self, dtype: type[np.generic], count: int) -> Tensor:
        # A copy, because torch wants memory that may be written to.
        array = np.frombuffer(self._content, dtype, count, self._offset).copy()
        self._offset += array.nbytes
        return torch.from_numpy(array)
