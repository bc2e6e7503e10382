"""A weight transfer backend for vLLM that reads tensors from a file, where there is no NCCL."""

from dataclasses import dataclass, field
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME = "file"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Has no options."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    path: str
    names: list[str] = field(default_factory=list)


class FileTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Does what vLLM's NCCL engine does, but for where tensors come from."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        model: Any = self.model
        with safe_open(update_info.path, "pt") as file:
            model.load_weights((name, file.get_tensor(name)) for name in update_info.names)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(NAME, FileTransferEngine)


class Extension:
    """A worker extension: vLLM imports this module in its workers to find it."""
