"""Processes that fill, restore or kill a store: ``python -m tests.store.children NAME FOLDER``."""

import os
import resource
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from darts_server.exceptions import StateError
from darts_server.store import Store

ROOT = Path(__file__).parents[2]


def start(name: str, folder: Path) -> "subprocess.Popen[str]":
    """Run one of the functions below in a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "tests.store.children", name, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def say(*words: object) -> None:
    print(*words, flush=True)


def put_for_ever(store: Store) -> None:
    """Print number and time of each put."""
    for number in count():
        store.put("prompt", f"{number:08}", {"number": number})
        say(number, time.monotonic())
        time.sleep(0.002)


def die_with_a_log(store: Store) -> None:
    """Leave a database whose newer half is in its write-ahead log."""
    for number in range(50):
        store.put("prompt", f"{number:032}", {"number": number, "mean": number / 7})
        store.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def restore_for_ever(store: Store) -> None:
    """Restore two states in turn, each with one number in all documents."""
    states = []
    for number in range(2):
        with Store() as state:
            for key in range(3000 + number):
                state.put("prompt", str(key), {"number": number})
            states.append(state.export())
    for turn in count():
        store.restore(states[turn % 2])
        say(turn)


def run_out_of_space(store: Store) -> None:
    """Run into the file size limit, which stands for a full disk."""
    store.put("prompt", "before", {"number": 1})
    store.flush()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, unlimited[1]))
    for number in range(2000):
        store.put("prompt", str(number), {"text": "x" * 200})
    try:
        store.flush()
    except StateError as error:
        say("flush failed", "state.db" in str(error))
    before = store.export()
    try:
        store.restore(before)
    except StateError:
        say("restore failed")
    store.put("prompt", "0", {"text": "newest"})
    say(store.fault is not None, store.count("prompt"), store.get("prompt", "0"), store.get("prompt", "before"))
    # The thread retries in vain.
    time.sleep(0.8)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    wait_until = time.monotonic() + 20
    # The thread retries without a call.
    while store.fault is not None and time.monotonic() < wait_until:
        time.sleep(0.05)
    say("recovered" if store.fault is None else store.fault)
    os.kill(os.getpid(), signal.SIGKILL)


def close_without_space(store: Store) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for number in range(2000):
        store.put("prompt", str(number), {"text": "x" * 200})
    try:
        store.close()
    except StateError:
        say("close failed")


def main() -> None:
    with Store(Path(sys.argv[2])) as store:
        globals()[sys.argv[1]](store)


if __name__ == "__main__":
    main()
