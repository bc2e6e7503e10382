"""The model in vLLM's engine, as the weights room sees it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio.to_thread import run_sync
from vllm.transformers_utils.repo_utils import get_model_path
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.exceptions import InvalidRequest, UpdateFailed, UpdateUnsupported
from darts_server.vllm.compat.engine import tell_version
from darts_server.vllm.lora import VllmLoras
from darts_server.weights.tensors import ExpectedTensors, TensorSet, read

if TYPE_CHECKING:
    from darts_server.vllm.llm import ShapingLLM

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
NO_WEIGHTS = (".rotary_emb.inv_freq",)
"""Ends of names that old checkpoints have and no model takes."""
FROM_SAFETENSORS = ("auto", "hf", "safetensors")


class VllmModel:
    """Implements :class:`darts_server.weights.port.Model`.

    The workers load by a method of ours (:mod:`darts_server.vllm.worker`), and not by a backend registered with vLLM's
    ``WeightTransferEngineFactory``: a server has one such backend, so ours would take the place of NCCL's.
    """

    def __init__(self, llm: "ShapingLLM") -> None:
        self._llm = llm
        self._original: TensorSet | None = None
        self.loras = None if llm.vllm_config.lora_config is None else VllmLoras(llm, self)

    @property
    def weight_version(self) -> int:
        return self._llm.weight_version

    async def expected(self) -> ExpectedTensors:
        tensors = {name: file.tensors[name] for name, file in (await self.original()).items()}
        embeddings = [name for name in tensors if name.endswith(EMBEDDING)]
        tied = self._ties and len(embeddings) == 1
        return ExpectedTensors(tensors, {HEAD: embeddings[0]} if tied else {})

    async def original(self) -> TensorSet:
        if self.loras is not None:
            raise UpdateUnsupported(
                "weights of a model that takes adapters cannot be replaced here; push adapters alone, or start the "
                "server without --enable-lora"
            )
        return await self.checkpoint()

    async def checkpoint(self) -> TensorSet:
        """Where the model was loaded from.

        Raises:
            UpdateUnsupported: it is a model for which no new weights are taken.
        """
        if self._original is None:
            self._refuse()
            self._original = await run_sync(self._checkpoint)
        return self._original

    async def pause(self) -> None:
        await AsyncLLM.pause_generation(self._llm, mode="keep", clear_cache=True)  # the engine's own, not a trainer's

    async def resume(self) -> None:
        await AsyncLLM.resume_generation(self._llm)

    async def stop(self) -> None:
        await AsyncLLM.pause_generation(self._llm, mode="abort", clear_cache=True)

    async def load(self, files: Mapping[Path, Sequence[str]]) -> None:
        plan = [(str(path), list(names)) for path, names in files.items()]
        await self._told("darts_load_weights", plan)

    async def abandon(self) -> None:
        await self._told("darts_abandon_update")

    async def clear(self) -> None:
        if not await self._llm.reset_prefix_cache():
            logger.warning("what stands still holds on to caches of the old weights, as POST /pause has left them")

    async def became(self, version: int) -> None:
        await tell_version(self._llm, version)
        self._llm.weight_version = version

    async def _told(self, method: str, *args: object) -> None:
        """Have the workers do this."""
        try:
            said = await self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise UpdateFailed(f"the engine failed while it loaded: {error}") from error
        if wrong := [error for error in said if error is not None]:
            raise UpdateFailed(f"the engine could not load the weights: {wrong[0]}")

    @property
    def _ties(self) -> bool:
        return bool(getattr(self._llm.model_config.hf_text_config, "tie_word_embeddings", False))

    def _refuse(self) -> None:
        """What was not tried is not done."""
        config: Any = self._llm.vllm_config
        sizes = config.parallel_config
        for what, value in (
            ("tensor", sizes.tensor_parallel_size),
            ("pipeline", sizes.pipeline_parallel_size),
            ("data", sizes.data_parallel_size),
        ):
            if value != 1:
                raise UpdateUnsupported(f"weights of a model with {what} parallelism = {value} cannot be replaced here")
        for what, thing in (
            ("quantized weights", self._llm.model_config.quantization),
            ("speculative decoding", config.speculative_config),
        ):
            if thing is not None:
                raise UpdateUnsupported(f"weights of a model with {what} cannot be replaced here")
        if config.load_config.load_format not in FROM_SAFETENSORS:
            raise UpdateUnsupported(
                f"weights of a model with --load-format {config.load_config.load_format} are unknown"
            )
        if getattr(self._llm.model_config, "word_embeddings_untied_by_checkpoint", False):
            raise UpdateUnsupported(f"the model's config ties {HEAD}, and its checkpoint has one; remove either")

    def _checkpoint(self) -> TensorSet:
        model = self._llm.model_config
        try:
            found = read(Path(get_model_path(model.model, model.revision)), "checkpoint")
        except InvalidRequest as error:
            raise UpdateUnsupported(f"what the model's weights must be is unknown: {error}") from error
        return {name: file for name, file in found.items() if not name.endswith(NO_WEIGHTS)}
