"""The end of a step on all ranks: what each of them gives the leader."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from inflight.executor.attention.backend import LayerKv
from inflight.executor.cpu.decoder import NativeDecoder
from inflight.executor.parallel.exchange import Exchange
from inflight.executor.parallel.messages import Want
from inflight.executor.step.batch import StepBatch


def gather_results(
    want: Want, batch: StepBatch, decoder: NativeDecoder, kv: tuple[LayerKv, ...], exchange: Exchange
) -> list[Tensor]:
    """Computes a step. Returns on rank 0 what each rank has, until the next step: the logits of its part of the
    vocabulary, padded to equal widths; or of each row the largest and its id, both as float64, which holds them
    exactly."""
    if want is Want.LARGEST:
        logits, ids = decoder.largest(batch, kv)
        return exchange.gather(torch.stack([logits.double(), ids.double()]))
    logits = decoder.logits(batch, kv)
    return exchange.gather(pad(logits, (0, result_width(decoder) - logits.shape[1])))


def result_width(decoder: NativeDecoder) -> int:
    """Returns the most tokens whose logits a rank computes."""
    columns = decoder.shard.of(0).columns(decoder.form.shape.vocabulary_size)
    return int(columns.stop - columns.start)
