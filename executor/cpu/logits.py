"""The logits stage on a CPU: a sequence's `LogitsRow` as the C++ code reads it (logits.h).

The structure is made once for a row, with the addresses of its arrays. A step sets the number of ids, and the mask if
it is another one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_float, c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from inflight.executor.logits.row import LogitsRow


class RowFields(ctypes.Structure):
    """`LogitsRow` of logits.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "bias_ids", "bias_values", "bad_starts", "bad_ids", "mask")),
        *((name, c_int64) for name in ("num_ids", "num_prompt", "num_biases", "num_bad_words", "num_mask_words")),
        ("ngram_size", c_int64),
        *((name, c_float) for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")),
    )


class NativeRow:
    """A row's structure. The row must outlive its use."""

    __slots__ = ("_fields", "_mask", "address")

    def __init__(self, row: LogitsRow) -> None:
        processors = row.processors
        self._mask: npt.NDArray[np.int32] | None = None
        self._fields = RowFields(
            ids=address(row.ids, np.int32),
            bias_ids=address(row.bias_ids, np.int32),
            bias_values=address(row.bias_values, np.float32),
            bad_starts=address(row.bad_starts, np.int32),
            bad_ids=address(row.bad_ids, np.int32),
            num_prompt=row.num_prompt,
            num_biases=len(row.bias_ids),
            num_bad_words=len(row.bad_starts) - 1,
            ngram_size=processors.no_repeat_ngram_size,
            repetition_penalty=processors.repetition_penalty,
            frequency_penalty=processors.frequency_penalty,
            presence_penalty=processors.presence_penalty,
        )
        self.address = ctypes.addressof(self._fields)

    def update(self, row: LogitsRow) -> int:
        """Takes over what may have changed since the last step. Returns the structure's address."""
        self._fields.num_ids = row.num_ids
        if row.mask is not self._mask:
            self._mask = row.mask
            self._fields.mask = None if row.mask is None else address(row.mask, np.int32)
            self._fields.num_mask_words = 0 if row.mask is None else len(row.mask)
        return self.address


def addresses_of(processed: Mapping[int, LogitsRow], num_rows: int) -> ctypes.Array[c_void_p] | None:
    """Returns the address of each row's structure, null for rows that are not processed; None if none is."""
    if not processed:
        return None
    addresses = (c_void_p * num_rows)()
    for index, row in processed.items():
        native = row.native
        if native is None:
            native = row.native = NativeRow(row)
        addresses[index] = native.update(row)
    return addresses


def address(column: npt.NDArray[np.generic], dtype: npt.DTypeLike) -> int:
    """Returns the address of an array. The C++ code gets only that, so the type is checked here."""
    if column.dtype != dtype or not column.flags.c_contiguous:
        raise ValueError(f"a column is {column.dtype}, not {np.dtype(dtype)}, or not contiguous")
    return int(column.__array_interface__["data"][0])
