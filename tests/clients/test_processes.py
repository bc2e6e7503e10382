"""Calls of a trainer's main process, with two processes."""

import multiprocessing
import os
from multiprocessing.queues import Queue

import pytest

from darts_server.offline.demo.server import bind_port


class Unpicklable(Exception):
    def __init__(self, message: str, more: int) -> None:
        super().__init__(message)


def fail() -> list[float]:
    raise Unpicklable("no weights", 1)


def run(rank: int, port: int, results: "Queue[tuple[int, str, str]]") -> None:
    """A process, with its result and its error."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from accelerate import PartialState

    from darts_client.integrations._processes import run_on_main

    PartialState(cpu=True)
    got = run_on_main(lambda: [0.5, rank])
    try:
        run_on_main(fail)
    except Exception as error:
        results.put((rank, str(got), f"{type(error).__name__}: {error}"))


@pytest.mark.nightly
def test_a_result_and_an_error_of_the_main_process_reach_all() -> None:
    spawn = multiprocessing.get_context("spawn")
    results: Queue[tuple[int, str, str]] = spawn.Queue()
    with bind_port() as free:  # one that no connection gets meanwhile
        port = free.getsockname()[1]
    processes = [spawn.Process(target=run, args=(rank, port, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=240) for _ in processes) == [
        (0, "[0.5, 0]", "Unpicklable: no weights"),
        (1, "[0.5, 0]", "RuntimeError: the main process failed: Unpicklable: no weights"),
    ]
    for process in processes:
        process.join()
