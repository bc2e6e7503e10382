"""What can go wrong in a trainer's process, in place of `trainer.train`. Imports little: processes start fast."""

import os
import time


def die(*_: object) -> None:
    os._exit(3)


def hang(*_: object) -> None:
    time.sleep(600)


def fail(*_: object) -> None:
    raise MemoryError


def report_nonsense(*_: object) -> tuple[None, bytes]:
    return None, b"nonsense"
