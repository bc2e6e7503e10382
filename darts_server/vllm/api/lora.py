"""LoRA adapters in vLLM's engine, and their model names in vLLM's server."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.exceptions import Conflict, InvalidRequest, NotFound, UpdateFailed
from darts_server.vllm.flags import RAW_SUFFIX
from darts_server.weights.lora_config import LoraLayers
from darts_server.weights.tensors import TensorSet

WEIGHT = ".weight"


class VllmLoras:
    """Implements :class:`darts_server.weights.port.LoraEngine`.

    A LoRA adapter keeps vLLM's integer id when it is replaced. Requests that began with the old adapter continue with
    the new adapter.

    ``read_checkpoint``: reads the headers of the model's tensors.
    """

    def __init__(self, llm: AsyncLLM, read_checkpoint: Callable[[], Awaitable[TensorSet]]) -> None:
        self._llm = llm
        self._read_checkpoint = read_checkpoint
        # vLLM's registry of served models, and the model names that are not shaped. `attach_registry` sets both.
        self._registry: Any = None
        self._raw_names: set[str] = set()
        self.pushed: dict[str, LoRARequest] = {}
        """Pushed adapters that are served, by name."""
        self.changes = 0
        """Number of times that an adapter was loaded or removed.

        If the number changes, the history of drafts ages, and an engine that is joining loads all adapters again.
        """
        # vLLM's ids of removed adapters: a request with an id that is not loaded would kill the engine.
        self._removed_ids: set[int] = set()
        self._layers: LoraLayers | None = None

    def attach_registry(self, registry: Any, raw_names: set[str]) -> None:
        self._registry = registry
        self._raw_names = raw_names

    async def layers(self) -> LoraLayers:
        if self._layers is None:
            tensors = await self._read_checkpoint()
            shapes: dict[str, tuple[int, int]] = {}
            # All workers have the same layers.
            names, *_ = await self._llm.collective_rpc("darts_lora_layers")
            for name in names:
                weight = name + WEIGHT
                shape = tensors[weight].tensors[weight].shape if weight in tensors else ()
                if len(shape) == 2:
                    shapes[name] = (shape[0], shape[1])
            config: Any = self._llm.vllm_config.lora_config
            self._layers = LoraLayers(shapes, config.max_lora_rank)
        return self._layers

    def check_name(self, name: str) -> None:
        if self._registry.is_base_model(name):
            raise InvalidRequest("name", f"{name!r} is the model itself; choose another name")
        registered = self._registry.lora_requests.get(name)
        if registered is not None and registered is not self.pushed.get(name):
            raise Conflict(
                "name",
                f"the LoRA adapter {name!r} was loaded by vLLM's flag or route; unload it, or choose another name",
            )

    async def load(self, name: str, folder: Path) -> None:
        """Serve the adapter in ``folder`` as ``name``, and unshaped with `RAW_SUFFIX`."""
        replaced = self.pushed.get(name)
        adapter_id = self._registry.lora_id_counter.inc(1) if replaced is None else replaced.lora_int_id
        # The LoRARequest that is sent with requests has no load_inplace: with it, the engine would load the files at
        # every step. Set it before the load: if only some workers load the adapter, the rollback needs its id.
        self.pushed[name] = LoRARequest(name, adapter_id, str(folder))
        try:
            load_request = LoRARequest(
                name,
                adapter_id,
                str(folder),
                load_inplace=True,
            )
            is_loaded = await AsyncLLM.add_lora(self._llm, load_request)
        except Exception as error:
            raise UpdateFailed(f"the engine could not load the LoRA adapter: {error}") from error
        if not is_loaded:
            raise UpdateFailed("the engine did not accept the LoRA adapter; its log says why")

        # The replaced adapter may have left NaN in caches.
        await self._llm.collective_rpc("darts_clean_caches")
        self.changes += 1
        raw_name = name + RAW_SUFFIX
        self._registry.lora_requests[name] = self.pushed[name]
        self._registry.lora_requests[raw_name] = LoRARequest(raw_name, adapter_id, str(folder))
        self._raw_names.add(raw_name)

    async def unload(self, name: str) -> None:
        request = self.pushed.pop(name, None)
        if request is None:
            return
        self._removed_ids.add(request.lora_int_id)
        self.changes += 1
        for served_name in (name, name + RAW_SUFFIX):
            self._registry.lora_requests.pop(served_name, None)
            self._raw_names.discard(served_name)
        # If this fails, vLLM evicts the adapter when it needs the space. No request can name it any more.
        with suppress(Exception):
            await self._llm.remove_lora(request.lora_int_id)

    def check_not_pushed(self, request: LoRARequest) -> None:
        if any(pushed.lora_int_id == request.lora_int_id for pushed in self.pushed.values()):
            raise Conflict(
                "name", f"the LoRA adapter {request.lora_name!r} was pushed; push it again, or delete it first"
            )

    def find_current(self, request: LoRARequest) -> LoRARequest:
        """Return the current adapter for a request, which may have waited while its adapter was replaced.

        Raises:
            NotFound: the adapter was removed meanwhile.
        """
        if request.lora_int_id in self._removed_ids:
            raise NotFound("model", f"the LoRA adapter {request.lora_name!r} was removed while the request waited")
        return self.pushed.get(request.lora_name.removesuffix(RAW_SUFFIX), request)
