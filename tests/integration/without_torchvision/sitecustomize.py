"""Lets vLLM import its vision models without torchvision, which the CPU build of PyTorch does not have.

vLLM imports the module of one other model for a check of types alone.
"""

import sys
import types
from typing import Any

NAME = "transformers.models.pixtral.image_processing_pixtral"


class Missing(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **more: None


sys.modules[NAME] = Missing(NAME)
