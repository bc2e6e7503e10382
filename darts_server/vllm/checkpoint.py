"""The checkpoint that vLLM loaded its model from: the names and shapes that new weights must have."""

from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from vllm.transformers_utils.repo_utils import get_model_path
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.exceptions import InvalidRequest, UpdateUnsupported
from darts_server.weights.tensors import TensorSet, read_tensors

HEAD = "lm_head.weight"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors of old checkpoints that no model loads."""
SAFETENSORS_FORMATS = ("auto", "hf", "safetensors")


class Checkpoint:
    """The model's checkpoint on disk, read once."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._tensors: TensorSet | None = None

    async def tensors(self) -> TensorSet:
        """The tensors of the checkpoint.

        Raises:
            UpdateUnsupported: the weights of such a model cannot be replaced.
        """
        if self._tensors is None:
            self._check_supported()
            self._tensors = await run_sync(self._read)
        return self._tensors

    def _check_supported(self) -> None:
        """Refuse what was never tested: a model that is served with wrong weights does not fail, it trains badly."""
        config: Any = self._llm.vllm_config
        sizes = config.parallel_config
        for name, value in (
            ("tensor", sizes.tensor_parallel_size),
            ("pipeline", sizes.pipeline_parallel_size),
            ("data", sizes.data_parallel_size),
        ):
            if value != 1:
                raise UpdateUnsupported(f"weights of a model with {name} parallelism = {value} cannot be replaced here")
        for name, setting in (
            ("quantized weights", self._llm.model_config.quantization),
            ("speculative decoding", config.speculative_config),
        ):
            if setting is not None:
                raise UpdateUnsupported(f"weights of a model with {name} cannot be replaced here")
        if config.load_config.load_format not in SAFETENSORS_FORMATS:
            raise UpdateUnsupported(
                f"weights of a model with --load-format {config.load_config.load_format} are unknown"
            )
        # Where the config ties the head and the checkpoint has one, vLLM compares the two tensors when it starts, and
        # ties the layers or not. It cannot change that for later weights.
        if getattr(self._llm.model_config, "word_embeddings_untied_by_checkpoint", False):
            raise UpdateUnsupported(f"the model's config ties {HEAD}, and its checkpoint has one; remove either")

    def _read(self) -> TensorSet:
        model = self._llm.model_config
        try:
            tensors = read_tensors(Path(get_model_path(model.model, model.revision)), "checkpoint")
        except InvalidRequest as error:
            raise UpdateUnsupported(f"the model's tensors are unknown: {error}") from error
        return {name: file for name, file in tensors.items() if not name.endswith(IGNORED_SUFFIXES)}
