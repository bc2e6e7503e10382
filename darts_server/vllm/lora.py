"""Low-rank adapters in vLLM's engine, and the names under which its server serves them."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.exceptions import Conflict, InvalidRequest, NotFound, UpdateFailed
from darts_server.vllm.requests import RAW_SUFFIX
from darts_server.weights.lora_config import LoraLayers

if TYPE_CHECKING:
    from darts_server.vllm.llm import ShapingLLM
    from darts_server.vllm.weights import VllmModel

WEIGHT = ".weight"


class VllmLoras:
    """Implements :class:`darts_server.weights.port.LoraEngine`.

    An adapter keeps vLLM's number for it when it is replaced. So a request that began with the one before goes on with
    the new one, and none ever asks the engine for an adapter that is not there, of which it would die.
    """

    def __init__(self, llm: "ShapingLLM", model: "VllmModel") -> None:
        self._llm = llm
        self._model = model
        self._registry: Any = None
        self._raw_names: set[str] = set()
        self._ours: dict[str, LoRARequest] = {}
        self._gone: set[int] = set()
        self._layers: LoraLayers | None = None

    def serve(self, registry: Any, raw_names: set[str]) -> None:
        """``registry``: vLLM's, of the names that its server serves. ``raw_names``: those that are never shaped."""
        self._registry = registry
        self._raw_names = raw_names

    async def layers(self) -> LoraLayers:
        if self._layers is None:
            tensors = await self._model.checkpoint()
            (names,) = await self._llm.collective_rpc("darts_lora_layers")
            shapes = {
                name: file.tensors[name + WEIGHT].shape
                for name in names
                if (file := tensors.get(name + WEIGHT)) is not None
            }
            config: Any = self._llm.vllm_config.lora_config
            plain = {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}
            self._layers = LoraLayers(plain, config.max_lora_rank)
        return self._layers

    def check_name(self, name: str) -> None:
        if self._registry.is_base_model(name):
            raise InvalidRequest("name", f"{name!r} is the model itself; choose another")
        known = self._registry.lora_requests.get(name)
        if known is not None and known is not self._ours.get(name):
            raise Conflict("name", f"the adapter {name!r} came by vLLM's own ways; unload it first, or choose another")

    async def put(self, name: str, folder: Path) -> None:
        number = self._ours[name].lora_int_id if name in self._ours else self._registry.lora_id_counter.inc(1)
        # What goes with requests must not say so: the engine would load it at every step.
        self._ours[name] = LoRARequest(name, number, str(folder))
        try:
            loaded = await AsyncLLM.add_lora(self._llm, LoRARequest(name, number, str(folder), load_inplace=True))
        except Exception as error:
            raise UpdateFailed(f"the engine could not load the adapter: {error}") from error
        if not loaded:
            raise UpdateFailed("the engine did not take the adapter")
        self._registry.lora_requests[name] = self._ours[name]
        raw = name + RAW_SUFFIX
        self._registry.lora_requests[raw] = LoRARequest(raw, number, str(folder))
        self._raw_names.add(raw)

    async def remove(self, name: str) -> None:
        if (request := self._ours.pop(name, None)) is None:
            return
        self._gone.add(request.lora_int_id)
        for served in (name, name + RAW_SUFFIX):
            self._registry.lora_requests.pop(served, None)
            self._raw_names.discard(served)
        with suppress(Exception):  # it only takes room, until another needs it
            await self._llm.remove_lora(request.lora_int_id)

    def check_foreign(self, request: LoRARequest) -> None:
        """
        Raises:
            Conflict: vLLM's own routes are to load it under the name of one that was pushed.
        """
        if any(ours.lora_int_id == request.lora_int_id for ours in self._ours.values()):
            raise Conflict("name", f"the adapter {request.lora_name!r} was pushed; push it again, or delete it first")

    def current(self, request: LoRARequest) -> LoRARequest:
        """What a request that has waited asks for now.

        Raises:
            NotFound: it was removed meanwhile.
        """
        if request.lora_int_id in self._gone:
            name = request.lora_name
            raise NotFound("model", f"the adapter {name!r} was removed while the request waited")
        return self._ours.get(request.lora_name.removesuffix(RAW_SUFFIX), request)
