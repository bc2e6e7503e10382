"""A platform of veRL without GPUs, for `VERL_USE_EXTERNAL_MODULES`. Ray's GPUs are counted, but are not there."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform


class Device(ModuleType):
    """`torch.cpu`, with the functions of `torch.cuda` that veRL calls. There is no memory to manage."""

    def __getattr__(self, name: str) -> Any:
        if "memory" in name:
            return lambda *_: 0
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False

    def get_device_name(self) -> str:
        return "CPU"

    def empty_cache(self) -> None:
        pass

    def ipc_collect(self) -> None:
        pass

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 1

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):  # type: ignore[misc]  # veRL has no types here
    device_name = "cpu"
    vendor_name = "none"
    device_module = Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


set_platform(Cpu())

init_process_group: Any = torch.distributed.init_process_group


def init_once(backend: str | None = None, **options: Any) -> None:
    """Name the backend of the CPU once: veRL names it for the CPU, and again for its device."""
    if backend == "cpu:gloo,cpu:gloo":
        backend = "cpu:gloo"
    init_process_group(backend, **options)


distributed: Any = torch.distributed
distributed.init_process_group = init_once

# The environment sees TRL 1.16, in which veRL misses a class.
sys.modules["trl"] = None  # type: ignore[assignment]

# After the platform is set, because this module asks for it.
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
