"""What can go wrong in a trainer's process, in place of `trainer.train`. Imports little: processes start fast."""

import os
import time
from typing import Any


def die(*_: object) -> Any:
    os._exit(3)


def hang(*_: object) -> Any:
    time.sleep(600)


def fail(*_: object) -> Any:
    raise MemoryError


def count_labels(*arguments: Any) -> Any:
    from darts_server.quality.types import TrainerReport

    return TrainerReport(labels=len(arguments[-1])), b""


def report_nonsense(*_: object) -> Any:
    return None, b"nonsense"
