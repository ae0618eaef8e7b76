"""The arithmetic and the report of `make bench-gpu`, and what it says where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from inflight.bench.gpu import main as bench
from inflight.bench.gpu.figures import (
    AttentionPoint,
    ChunkAttentionPoint,
    DecodePoint,
    GpuFigures,
    KernelTime,
    Missing,
    PrefillPoint,
)
from inflight.bench.gpu.report import page
from inflight.bench.gpu.roofline import LLAMA_3_1B, LLAMA_3_8B, Limits, ModelShape, decode_bytes, prefill_operations

TINY = ModelShape("tiny", 4, 2, 2, 1, 2, 8, 10, has_tied_embeddings=True)


def test_shapes_have_the_published_sizes() -> None:
    assert LLAMA_3_8B.num_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_3_1B.num_parameters == pytest.approx(1.236e9, rel=1e-3)
    assert LLAMA_3_8B.kv_bytes_per_token == 128 * 1024
    assert LLAMA_3_8B.kv_bytes_per_layer_and_token == 4096


def test_tiny_model_counted_by_hand() -> None:
    # Per layer: queries 4x4, keys and values 2 * 4x2, output 4x4, feed-forward 3 * 4x8
    assert TINY.layer_weights == 2 * (16 + 16 + 16 + 96)
    assert TINY.head_weights == 40
    assert TINY.num_parameters == 288 + 40
    # Two layers of a key and a value of two numbers of two bytes
    assert TINY.kv_bytes_per_token == 16
    assert decode_bytes(TINY, num_sequences=3, context=5) == (288 + 40) * 2 + 3 * 5 * 16
    # Three tokens see 1, 2 and 3 keys; a query and a key of 2 heads cost 4 operations of 2 numbers in each layer
    assert prefill_operations(TINY, 3) == 2 * (288 * 3 + 40) + 4 * 2 * 2 * 2 * 6


def test_limits_are_bytes_and_operations_over_their_rates() -> None:
    limits = Limits(copy_bytes_per_s=1e3, matrix_operations_per_s=1e4)
    assert limits.decode_s(TINY, 3, 5) == pytest.approx(decode_bytes(TINY, 3, 5) / 1e3)
    assert limits.prefill_s(TINY, 3) == pytest.approx(prefill_operations(TINY, 3) / 1e4)


def figures() -> GpuFigures:
    """A run in which everything takes twice its limit."""
    return GpuFigures(
        circumstances={"gpu": "GPU X"},
        model="Llama-3-8B",
        copy_bytes_per_s=4e12,
        matrix_operations_per_s=8e14,
        decodes=[DecodePoint(32, 1000, 2 * Limits(4e12, 8e14).decode_s(LLAMA_3_8B, 32, 1000), 0.008)],
        penalised_decodes=[DecodePoint(8, 1000, 4 * Limits(4e12, 8e14).decode_s(LLAMA_3_8B, 8, 1000), 0.008)],
        prefills=[PrefillPoint(2048, 2 * Limits(4e12, 8e14).prefill_s(LLAMA_3_8B, 2048))],
        fp8_decodes=[DecodePoint(32, 1000, 5 * Limits(4e12, 8e14).decode_s(LLAMA_3_8B, 32, 1000, is_fp8=True), 0.005)],
        kernels=[KernelTime("32 decodes", "attend_kernel", 32, 0.0016), KernelTime("32 decodes", "x" * 200, 1, 0.0004)],
        attention=[AttentionPoint(32, 1000, 32 * 1000 * 4096 / 2e12)],
        chunk_attention=[ChunkAttentionPoint("flashinfer", 1024, 8192, 0.0005)],
        missing=[Missing("decode, 256 sequences", "out of memory")],
    )


def test_report_sets_figures_against_limits() -> None:
    report = page(figures(), LLAMA_3_8B).markdown()
    assert report.startswith("# Llama-3-8B on GPU X\n")
    assert report.count("| 50% |") == 3, "decode, prefill and attention"
    assert report.count("| 25% |") == 1, "decode with penalties"
    assert report.count("| 20% |") == 1, "decode in FP8"
    assert "## Kernels of a step: 32 decodes" in report
    assert "| attend_kernel | 32 | 50.0 | 1.600 | 80.0% |" in report
    assert "x" * 81 not in report
    assert "| flashinfer | 1024 | 8192 | 500.0 |" in report
    assert "copy 4.00 TB/s (read and written), matrix products 800 TFLOP/s" in report
    assert "| decode, 256 sequences | out of memory |" in report


def test_report_leaves_out_tables_without_rows() -> None:
    assert not page(GpuFigures({"gpu": "GPU X"}, "Llama-3-8B", 4e12, 8e14), LLAMA_3_8B).parts


def test_what_cannot_be_had_is_noted_and_the_rest_goes_on() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    def no_memory() -> float:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nand more text")

    def no_package() -> float:
        raise ImportError("no such package")

    found = figures()
    found.missing.clear()
    assert bench.attempt(found, "a", lambda: 3) == 3
    assert bench.attempt(found, "b", no_memory) is None
    assert bench.attempt(found, "c", no_package) is None
    assert found.missing == [Missing("b", "out of memory"), Missing("c", "ImportError: no such package")]


def test_report_is_written_after_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(found: GpuFigures, *_: object) -> Iterator[None]:
        found.decodes.append(DecodePoint(1, 1000, 0.5, 0.5))
        yield
        assert "| 1 | 1000 | 500.00 |" in (tmp_path / "gpu-8b.md").read_text()
        raise KeyboardInterrupt

    session = SimpleNamespace(
        why_not=lambda: None,
        circumstances=lambda: {"gpu": "GPU X"},
    )
    limits = SimpleNamespace(copy_bytes_per_s=lambda: 4e12, matrix_operations_per_s=lambda: 8e14)
    monkeypatch.setattr(bench, "gpu", session)
    monkeypatch.setattr(bench, "device", limits)
    monkeypatch.setattr(bench, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--models", "8b", "--out", str(tmp_path)])


def test_without_a_gpu_it_says_so_in_one_line_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: there is no GPU to measure: torch sees no NVIDIA GPU here\n"
    assert captured.out == ""
