"""AReaL without the loggers that it imports, which require many packages: `train` does not use them."""

import sys
from types import ModuleType

import accelerate  # noqa: F401  # looks for the loggers, too, and must not find the stand-ins

for _name in ("swanlab", "trackio", "wandb"):
    sys.modules[_name] = ModuleType(_name)
