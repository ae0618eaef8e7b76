"""vLLM itself: the only module that imports it.

It uses `AsyncLLM` (`generate`, its configuration, its task `output_handler`), the flags of `AsyncEngineArgs`, a stat
logger, and the fields of `SamplingParams`. Stat loggers and their statistics are no stable interface of vLLM, so the
supported versions are checked at the start.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
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


class VllmBackend:
    """Implements `Backend` with an `AsyncLLM`."""

    def __init__(self, llm: Any, facts: Facts, on_step: list[Callable[[StepStats], None]]) -> None:
        self._llm = llm
        self._facts = facts
        self._on_step = on_step

    @property
    def facts(self) -> Facts:
        """See `Backend`."""
        return self._facts

    def watch_steps(self, on_step: Callable[[StepStats], None]) -> None:
        """See `Backend`."""
        self._on_step.append(on_step)

    async def generate(
        self, request_id: str, prompt_ids: list[int], parameters: Mapping[str, Any], cache_salt: str | None
    ) -> AsyncIterator[Produced]:
        """See `Backend`."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt: Any = {"type": "token", "prompt_token_ids": prompt_ids}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        num_likeliest = parameters.get("logprobs"), parameters.get("prompt_logprobs")
        try:
            outputs = self._llm.generate(prompt, _sampling_params(parameters), request_id)
            async with aclosing(outputs):
                async for output in outputs:
                    yield produced_of(output, *num_likeliest)
        except EngineDeadError as error:
            raise BackendLostError from error
        except (VLLMClientError, ValueError) as error:
            raise RefusedError(str(error)) from error

    async def wait_until_lost(self) -> None:
        """See `Backend`. The task that reads from the engine ends when the engine has."""
        await asyncio.wait((self._llm.output_handler,))

    def close(self) -> None:
        """See `Backend`."""
        self._llm.shutdown()


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
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(flags), stat_loggers=[_stat_logger(on_step)])
    except Exception as error:
        log.exception("vLLM does not start")
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelError(f"vLLM does not start: {first_line}") from error
    return VllmBackend(llm, facts_of(llm.vllm_config, version), on_step)


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


def facts_of(config: Any, version: str) -> Facts:
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
