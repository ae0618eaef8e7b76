"""Stand-in for FlashInfer, in torch: its documented semantics, and the signatures of the real package.

`SIGNATURES` are those of flashinfer-python 0.7.2.post1, `flashinfer/prefill.py`: the parameters up to the last one that
is used. Calls are bound to them, so a wrong name or place is an error here as it would be there.
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor

VERSION = "0.7.2.post1"
_PLACES, _NAMES = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
_PLAN = (
    *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads"),
    *("head_dim_qk", "page_size", "head_dim_vo", "custom_mask", "packed_custom_mask", "causal", "pos_encoding_mode"),
    *("use_fp16_qk_reduction", "sm_scale", "window_left", "logits_soft_cap", "rope_scale", "rope_theta"),
    *("q_data_type", "kv_data_type"),
)
SIGNATURES = {
    "__init__": Signature([Parameter(name, _PLACES) for name in ("float_workspace_buffer", "kv_layout")]),
    # The last parameters, from `head_dim_vo` on, have defaults.
    "plan": Signature(
        [Parameter(name, _PLACES, default=None if i > 7 else Parameter.empty) for i, name in enumerate(_PLAN)]
    ),
    "run": Signature(
        [Parameter("q", _PLACES), Parameter("paged_kv_cache", _PLACES), Parameter("out", _NAMES, default=None)]
    ),
}


class BatchPrefillWithPagedKVCacheWrapper:
    """Refuses what the documentation forbids. `num_runs` counts those of all wrappers; `scale_error` is a fault."""

    num_runs = 0
    scale_error = 1.0

    def __init__(self, *args: object, **options: object) -> None:
        bound = SIGNATURES["__init__"].bind(*args, **options).arguments
        assert bound["kv_layout"] == "HND"
        assert bound["float_workspace_buffer"].dtype == torch.uint8
        self._plan: dict[str, Any] = {}

    def plan(self, *args: object, **options: object) -> None:
        plan = SIGNATURES["plan"].bind(*args, **options).arguments
        starts, page_starts = plan["qo_indptr"], plan["paged_kv_indptr"]
        pages, last = plan["paged_kv_indices"], plan["paged_kv_last_page_len"]
        for tensor in (starts, page_starts, pages, last):
            assert tensor.dtype == torch.int32, "the kernels' index type"
            assert tensor.device.type == "cpu", "otherwise planning waits for the device"
        num_pages = page_starts.diff()
        assert starts[0] == page_starts[0] == 0
        assert len(starts) == len(page_starts) == len(last) + 1
        assert len(pages) == page_starts[-1]
        assert bool((starts.diff() >= 0).all())
        assert bool((num_pages >= 0).all())
        is_used = num_pages > 0
        assert bool(((last >= 1) & (last <= plan["page_size"]))[is_used].all())
        assert plan["causal"]
        self._plan = dict(plan)

    def run(self, *args: object, **options: object) -> Tensor:
        type(self).num_runs += 1
        bound = SIGNATURES["run"].bind(*args, **options).arguments
        plan, queries, (keys, values) = self._plan, bound["q"], bound["paged_kv_cache"]
        out: Tensor = bound["out"]
        assert plan, "run before plan"
        starts, page_starts = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        size = plan["page_size"]
        assert queries.shape == (starts[-1], plan["num_qo_heads"], plan["head_dim_qk"]) == out.shape
        assert queries.dtype == plan["q_data_type"] == out.dtype
        assert keys.dtype == values.dtype == plan["kv_data_type"]
        assert queries.stride(-1) == 1
        assert keys.shape[1:] == values.shape[1:] == (plan["num_kv_heads"], size, plan["head_dim_qk"])
        for i, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            pages = plan["paged_kv_indices"][page_starts[i] : page_starts[i + 1]].long()
            length = max(len(pages) - 1, 0) * size + last
            # [pages, heads, page, numbers] -> [tokens, heads, numbers]
            context = [part[pages].transpose(1, 2).flatten(0, 1)[:length].float() for part in (keys, values)]
            out[starts[i] : starts[i + 1]] = self._attend(queries[starts[i] : starts[i + 1]].float(), *context)
        return out

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        plan = self._plan
        group = plan["num_qo_heads"] // plan["num_kv_heads"]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * plan["sm_scale"] * self.scale_error
        if plan["logits_soft_cap"] > 0:
            scores = plan["logits_soft_cap"] * (scores / plan["logits_soft_cap"]).tanh()
        num_queries, num_keys = scores.shape[1:]
        query, key = torch.arange(num_queries)[:, None], torch.arange(num_keys)
        sees = key <= query + num_keys - num_queries
        if plan["window_left"] >= 0:
            # As in its `attention/variants.cuh`.
            sees &= key + num_queries + plan["window_left"] >= num_keys + query
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, float("-inf")).softmax(-1), values)
