"""vLLM itself: the only module that imports it, besides those that run in vLLM's own processes.

It uses `AsyncLLM` (`generate`, its adapters, its task `output_handler`, its `OutputProcessor`), the flags of
`AsyncEngineArgs` and the `VllmConfig` that they make, a stat logger, KV events, and the fields of `SamplingParams`.
Stat loggers, their statistics and the processing of outputs are no stable interface of vLLM, so the supported versions
are checked at the start.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from inflight.common.model_source import ModelError
from inflight.common.settings import SettingError
from inflight.executor.scheduler.sequence import TokenLogprobs
from inflight.executor.vllm.backend import BackendLostError, Facts, Produced, RefusedError, StepStats
from inflight.executor.vllm.children import ending_with_this_process

log = logging.getLogger(__name__)

# The oldest version, and the newest one that the tests ran with.
MIN_VERSION = (0, 30)
TESTED_VERSION = (0, 32)
# What generates given tokens again, for each of vLLM's model runners.
REPLAY_PROCESSOR = "inflight.executor.vllm.replay:ReplayedOutput"
REPLAY_PROCESSOR_V2 = "inflight.executor.vllm.replay_v2:ReplayedOutput"


class VllmBackend:
    """Implements `Backend` with an `AsyncLLM`."""

    def __init__(
        self,
        llm: Any,
        facts: Facts,
        on_step: list[Callable[[StepStats], None]],
        cache_events: CacheEvents | None = None,
    ) -> None:
        self._llm = llm
        self._facts = facts
        self._on_step = on_step
        self._cache_events = cache_events
        self._takers: dict[str, Callable[[Produced], None]] = {}
        take_tokens(llm.output_processor, self._takers)
        # By slot. vLLM knows an adapter by a number, which is never used again.
        self._adapters: dict[int, Any] = {}
        self._num_adapters = 0

    @property
    def facts(self) -> Facts:
        """See `Backend`."""
        return self._facts

    def watch_steps(self, on_step: Callable[[StepStats], None]) -> None:
        """See `Backend`."""
        self._on_step.append(on_step)

    def watch_cache(self, on_change: Callable[[int], None]) -> None:
        """See `Backend`."""
        if self._cache_events is not None:
            self._cache_events.watch(on_change)

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        parameters: Mapping[str, Any],
        cache_salt: str | None,
        take: Callable[[Produced], None],
        adapter_slot: int | None = None,
        priority: int = 0,
    ) -> None:
        """See `Backend`."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt: Any = {"type": "token", "prompt_token_ids": prompt_ids}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        num_likeliest = parameters.get("logprobs"), parameters.get("prompt_logprobs")
        adapter = None if adapter_slot is None else self._adapters[adapter_slot]
        self._takers[request_id] = take
        try:
            outputs = self._llm.generate(
                prompt, _sampling_params(parameters), request_id, lora_request=adapter, priority=priority
            )
            async with aclosing(outputs):
                async for output in outputs:
                    take(produced_of(output, *num_likeliest))
        except EngineDeadError as error:
            raise BackendLostError from error
        except (VLLMClientError, ValueError) as error:
            raise RefusedError(str(error)) from error
        finally:
            del self._takers[request_id]

    async def load_adapter(self, slot: int, name: str, folder: Path) -> None:
        """See `Backend`."""
        from vllm.lora.request import LoRARequest

        await self.remove_adapter(slot)
        self._num_adapters += 1
        adapter = LoRARequest(lora_name=name, lora_int_id=self._num_adapters, lora_path=str(folder))
        try:
            await self._llm.add_lora(adapter)
        except Exception as error:
            raise RefusedError(str(error)) from error
        self._adapters[slot] = adapter

    async def remove_adapter(self, slot: int) -> None:
        """See `Backend`."""
        adapter = self._adapters.pop(slot, None)
        if adapter is not None:
            await self._llm.remove_lora(adapter.lora_int_id)

    async def wait_until_lost(self) -> None:
        """See `Backend`. The task that reads from the engine ends when the engine has."""
        await asyncio.wait((self._llm.output_handler,))

    def close(self) -> None:
        """See `Backend`."""
        if self._cache_events is not None:
            self._cache_events.close()
        self._llm.shutdown()


class CachedBlocks:
    """The blocks of the prefix cache, by vLLM's KV events. If layers of several kinds have blocks of their own, those
    of the first kind count. vLLM repeats a block when another request uses it."""

    def __init__(self) -> None:
        self._hashes: set[Any] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def take(self, events: Sequence[Any]) -> None:
        """Takes the events of a step."""
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self._hashes.clear()
            elif not getattr(event, "group_idx", None):
                change = self._hashes.update if kind == "BlockStored" else self._hashes.difference_update
                change(event.block_hashes)


class CacheEvents:
    """Receives KV events, which vLLM's engine publishes by ZeroMQ, over a socket in a folder of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="inflight-")
        self._blocks = CachedBlocks()
        self._reading: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        """Where vLLM is to publish."""
        return f"ipc://{self._folder.name}/kv"

    def watch(self, on_change: Callable[[int], None]) -> None:
        """Reads from now on, and calls `on_change` with the number of blocks."""
        self._reading = asyncio.create_task(self._read(on_change), name="KV events of vLLM")

    async def _read(self, on_change: Callable[[int], None]) -> None:
        import msgspec
        import zmq.asyncio
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self.endpoint)
            while True:
                # A topic, a number and the events.
                parts = await socket.recv_multipart()
                self._blocks.take(decoder.decode(parts[-1]).events)
                on_change(len(self._blocks))

    def close(self) -> None:
        """Stops reading."""
        if self._reading is not None:
            self._reading.cancel()
        self._folder.cleanup()


async def start_vllm(arguments: Sequence[str]) -> VllmBackend:
    """Starts vLLM with these flags; it takes a minute or more. Must run before anything else uses the process' threads,
    because vLLM forks. Raises `SettingError` and `ModelError`."""
    version = check_version()
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise SettingError(f"engine=vllm: vLLM {version} cannot be used: {error}") from error
    try:
        flags = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="engine_args")).parse_args(list(arguments))
    except SystemExit as wrong:
        raise SettingError("engine_args: vLLM does not know these flags (see above)") from wrong
    on_step: list[Callable[[StepStats], None]] = []
    try:
        with ending_with_this_process():
            config = AsyncEngineArgs.from_cli_args(flags).create_engine_config()
            can_replay, cache_events = allow_replay(config), publish_cache(config)
            workers, loggers = executor_class(config), [_stat_logger(on_step)]
            llm = AsyncLLM(config, workers, log_stats=False, log_requests=False, stat_loggers=loggers)
            drop_prometheus(llm.logger_manager.stat_loggers)
    except Exception as error:
        log.exception("vLLM does not start")
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelError(f"vLLM does not start: {first_line}") from error
    return VllmBackend(llm, facts_of(llm.vllm_config, version, can_replay=can_replay), on_step, cache_events)


def drop_prometheus(loggers: list[Any]) -> None:
    """Removes the logger that vLLM always adds to its own. It feeds metrics that nothing reads here."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    loggers[:] = [one for one in loggers if not isinstance(one, PrometheusStatLogger)]


def executor_class(config: Any) -> type:
    """Returns vLLM's class that runs its workers, on a CPU the one that waits for them."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    chosen: type = Executor.get_class(config)
    if chosen is MultiprocExecutor and config.device_config.device_type == "cpu":
        from inflight.executor.vllm.waiting import WaitingExecutor

        return WaitingExecutor
    return chosen


def publish_cache(config: Any) -> CacheEvents | None:
    """Makes vLLM publish its KV events, and returns what receives them; None without a prefix cache, and if the user
    publishes them elsewhere."""
    from vllm.config import KVEventsConfig

    if config.kv_events_config is not None or not config.cache_config.enable_prefix_caching:
        return None
    events = CacheEvents()
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=events.endpoint)
    return events


def allow_replay(config: Any) -> bool:
    """Makes vLLM load what generates given tokens again, and returns whether it can: not when it drafts, and not in a
    second model runner that takes no logits processors."""
    if config.speculative_config is not None:
        return False
    processor = REPLAY_PROCESSOR
    if getattr(config, "use_v2_model_runner", False):
        processor = REPLAY_PROCESSOR_V2
        try:
            importlib.import_module(processor.partition(":")[0])
        except ImportError:
            return False
    config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), processor]
    return True


def check_version() -> str:
    """Returns vLLM's version. Raises `SettingError` where there is none, or one that is too old."""
    try:
        from vllm.version import __version__, __version_tuple__
    except ModuleNotFoundError as error:
        raise SettingError(
            f"engine=vllm: {sys.executable} has no {error.name}; run the executor with the Python of vLLM's "
            "environment, and install inflight[vllm] there"
        ) from error
    number: Any = __version_tuple__[:2]
    least = ".".join(map(str, MIN_VERSION))
    # (0, 0) is a build from a source tree.
    if (0, 0) < number < MIN_VERSION:
        raise SettingError(f"engine=vllm: vLLM {__version__} is too old; {least} and later are supported")
    if number > TESTED_VERSION:
        log.warning(
            "vLLM %s is newer than %s, with which this was tested", __version__, ".".join(map(str, TESTED_VERSION))
        )
    return str(__version__)


def facts_of(config: Any, version: str, *, can_replay: bool = False) -> Facts:
    """Returns the properties of a started vLLM from its `VllmConfig`. Raises `SettingError` for a setting of vLLM that
    contradicts admission by the ledger."""
    cache, scheduler, model, parallel = (
        config.cache_config,
        config.scheduler_config,
        config.model_config,
        config.parallel_config,
    )
    if parallel.data_parallel_size > 1:
        raise SettingError("engine_args: data_parallel_size: start an executor for each replica instead")
    dtype = str(model.dtype).removeprefix("torch.")
    return Facts(
        version=version,
        block_size=cache.block_size,
        num_blocks=_num_blocks(config),
        max_num_sequences=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        context_length=model.max_model_len,
        vocabulary_size=model.get_vocab_size(),
        dtype=dtype,
        weight_dtype=str(model.quantization or dtype),
        kv_cache_dtype=dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        device=str(config.device_config.device_type),
        tensor_parallel_size=parallel.tensor_parallel_size,
        can_replay=can_replay,
        num_adapter_slots=0 if config.lora_config is None else config.lora_config.max_loras,
    )


def _num_blocks(config: Any) -> int:
    """Returns the blocks that can be promised to requests. vLLM keeps one for itself. If layers of several kinds share
    the blocks, its capacity in tokens says how many fit. Drafts take blocks beyond the tokens of a request."""
    cache = config.cache_config
    num_blocks = cache.num_gpu_blocks - 1
    capacity = getattr(cache, "kv_cache_size_tokens", None)
    if capacity is not None:
        num_blocks = min(num_blocks, capacity // cache.block_size)
    if config.speculative_config is not None:
        num_drafts = 1 + 2 * config.speculative_config.num_speculative_tokens
        num_blocks -= config.scheduler_config.max_num_seqs * -(-num_drafts // cache.block_size)
    if num_blocks < 1:
        raise SettingError("engine_args: the KV cache is too small for its drafts")
    return int(num_blocks)


def take_tokens(processor: Any, takers: Mapping[str, Callable[[Produced], None]]) -> None:
    """Makes vLLM's `OutputProcessor` give outputs that are nothing but tokens to the requests' takers, which are by
    external id. It would make several objects of each and wake the request's reader. All others go its way, and so does
    what comes before they were read."""
    process, states = processor.process_outputs, processor.request_states

    def taker_of(output: Any) -> Callable[[Produced], None] | None:
        state = states.get(output.request_id)
        is_plain = output.finish_reason is None and output.events is None and output.new_logprobs is None
        if state is None or state.is_prefilling or not is_plain or state.queue.output is not None:
            return None
        return takers.get(state.external_req_id)

    def process_outputs(outputs: Sequence[Any], *arguments: Any, **named: Any) -> Any:
        found = [taker_of(output) for output in outputs]
        processed = process(
            [output for output, take in zip(outputs, found, strict=True) if take is None], *arguments, **named
        )
        for output, take in zip(outputs, found, strict=True):
            if take is not None:
                take(Produced(tuple(output.new_token_ids)))
        return processed

    processor.process_outputs = process_outputs


def produced_of(output: Any, num_top: int | None, num_prompt_top: int | None) -> Produced:
    """Makes `Produced` of a `RequestOutput` with one choice, whose output is what is new (`DELTA`)."""
    (choice,) = output.outputs
    token_ids = tuple(choice.token_ids)
    logprobs: tuple[TokenLogprobs, ...] = ()
    if num_top is not None and token_ids:
        logprobs = tuple(
            _token_logprobs(values, token_id, num_top)
            for token_id, values in zip(token_ids, choice.logprobs, strict=True)
        )
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    if num_prompt_top is not None and output.prompt_logprobs:
        # Nothing precedes the first token, so it has none.
        rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        prompt_logprobs = tuple(_token_logprobs(values, token_id, num_prompt_top) for token_id, values in rows)
    return Produced(token_ids, output.num_cached_tokens or 0, logprobs, prompt_logprobs, choice.finish_reason)


def _token_logprobs(values: Mapping[int, Any], token_id: int, num_top: int) -> TokenLogprobs:
    """vLLM gives the sampled token and the likeliest ones, in any order."""
    top = sorted((one.rank, other, one.logprob) for other, one in values.items() if one.rank <= num_top)[:num_top]
    own = values[token_id]
    return TokenLogprobs(own.logprob, tuple(one[1] for one in top), tuple(one[2] for one in top), own.rank)


def stats_of(scheduler: Any, iteration: Any) -> StepStats:
    """Makes `StepStats` of vLLM's `SchedulerStats` and, if a request got output, its `IterationStats`."""
    prefix, drafts = scheduler.prefix_cache_stats, scheduler.spec_decoding_stats
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    if drafts is not None:
        accepted = tuple(drafts.num_accepted_tokens_per_pos)
        drafted = tuple(getattr(drafts, "num_draft_tokens_per_pos", None) or (drafts.num_drafts,) * len(accepted))
    return StepStats(
        num_running=scheduler.num_running_reqs,
        num_waiting=scheduler.num_waiting_reqs,
        kv_usage=scheduler.kv_cache_usage,
        num_prompt_tokens=0 if iteration is None else iteration.prompt_token_stats.computed,
        num_query_tokens=0 if prefix is None else prefix.queries,
        num_hit_tokens=0 if prefix is None else prefix.hits,
        num_preemptions=0 if iteration is None else iteration.num_preempted_reqs,
        drafted=drafted,
        accepted=accepted,
    )


def _stat_logger(on_step: list[Callable[[StepStats], None]]) -> Callable[[Any, int], Any]:
    """Returns a factory of vLLM's stat loggers that passes each step on."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepLogger(StatLoggerBase):  # type: ignore[misc]
        """vLLM calls `record` after each step."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            """vLLM makes one for each engine; there is one."""

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            """Passes the statistics on."""
            if scheduler_stats is not None:
                stats = stats_of(scheduler_stats, iteration_stats)
                for call in on_step:
                    call(stats)

        def log_engine_initialized(self) -> None:
            """vLLM's other loggers say it."""

    return StepLogger


def _sampling_params(parameters: Mapping[str, Any]) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    given = dict(parameters)
    if (form := given.pop("structured_outputs", None)) is not None:
        given["structured_outputs"] = StructuredOutputsParams(**form)
    return SamplingParams(**given, output_kind=RequestOutputKind.DELTA)
