"""LoRA adapters of an executor with vLLM: the folder, the slots and the names are those of our own engine; vLLM reads
the weights.

vLLM finds prefixes by the name of an adapter, so it gets the content's hash as the name. It loads at most as many as
there are slots, so it never drops one by itself and reads it again after its files have changed.
"""

from __future__ import annotations

import asyncio

from inflight.common.settings import SettingError
from inflight.executor.adapters.errors import AdapterError, AdapterGoneError
from inflight.executor.adapters.folder import AdapterFolder, KnownAdapter
from inflight.executor.adapters.store import AdapterStore
from inflight.executor.adapters.weights import AdapterWeights, RankLimit
from inflight.executor.settings import ExecutorSettings
from inflight.executor.vllm.backend import Backend, RefusedError


def open_adapters(settings: ExecutorSettings, backend: Backend) -> AdapterStore | None:
    """Returns the adapters in the folder of the settings; None without one. Must be called on the event loop. Raises
    `SettingError`."""
    folder = settings.adapter_folder
    if folder is None:
        return None
    if not folder.is_dir():
        raise SettingError(f"adapter_folder={str(folder)!r} is not a folder")
    adapters = AdapterFolder(folder, RankLimit(settings.max_adapter_rank))
    loop = asyncio.get_running_loop()

    async def load(slot: int, adapter: KnownAdapter) -> None:
        try:
            await backend.load_adapter(slot, adapter.hash, adapter.folder)
        except RefusedError as refusal:
            raise AdapterError(f"vLLM refuses it: {refusal}") from refusal
        try:
            await asyncio.to_thread(adapters.read, adapter)
        except AdapterGoneError:
            # vLLM may have read the new files.
            await backend.remove_adapter(slot)
            raise

    def load_on_loop(slot: int, adapter: KnownAdapter, weights: AdapterWeights) -> None:
        asyncio.run_coroutine_threadsafe(load(slot, adapter), loop).result()

    return AdapterStore(adapters, backend.facts.num_adapter_slots, load_on_loop)
