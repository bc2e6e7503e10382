"""A way for a trainer's tensors into vLLM's workers by vLLM's own routes, where there is no NCCL: from a file."""

from dataclasses import dataclass, field
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME = "file"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to say."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    path: str
    names: list[str] = field(default_factory=list)


class FromFile(WeightTransferEngine[InitInfo, UpdateInfo]):
    """As vLLM's NCCL engine, but for where tensors come from."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]

    def receive_weights(self, update_info: UpdateInfo) -> None:
        model: Any = self.model
        with safe_open(update_info.path, "pt") as file:
            model.load_weights((name, file.get_tensor(name)) for name in update_info.names)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(NAME, FromFile)


class Extension:
    """Brings this module into the workers."""
