"""Messages of the engine arrive whole, in order and without loss, and a closed socket is no longer waited for."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
import zmq
import zmq.asyncio

from darts_server.vllm.requests.receiver import receive_directly

pytestmark = pytest.mark.anyio
SECONDS = 20


@pytest.fixture
def sender() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        yield socket


@pytest.fixture
def receiver(sender: zmq.Socket[bytes]) -> Iterator[zmq.asyncio.Socket]:
    port = sender.bind_to_random_port("tcp://127.0.0.1")
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        yield socket


async def test_all_messages_arrive_in_order(sender: zmq.Socket[bytes], receiver: zmq.asyncio.Socket) -> None:
    receive_directly(SimpleNamespace(resources=SimpleNamespace(output_socket=receiver)))
    random = Random(0)
    count = 2000
    received: list[tuple[int, int]] = []

    async def receive() -> None:
        while len(received) < count:
            first, second = await receiver.recv_multipart(copy=False)
            received.append((int(first.bytes), len(second.bytes)))

    receiving = asyncio.create_task(receive())
    sent = []
    for number in range(count):
        sent.append((number, random.choice([0, 10, 100_000])))
        await asyncio.to_thread(sender.send_multipart, [str(number).encode(), bytes(sent[-1][1])])
        # Some messages arrive while the receiver waits, and others while it does not.
        if random.random() < 0.2:
            await asyncio.sleep(random.choice([0, 0.001]))
    await asyncio.wait_for(receiving, SECONDS)
    assert received == sent


async def test_a_receiver_that_is_cancelled_loses_nothing(
    sender: zmq.Socket[bytes], receiver: zmq.asyncio.Socket
) -> None:
    receive_directly(SimpleNamespace(resources=SimpleNamespace(output_socket=receiver)))
    waiting: asyncio.Future[list[bytes]] = asyncio.ensure_future(receiver.recv_multipart())
    await asyncio.sleep(0.01)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    sender.send_multipart([b"a"])
    assert await asyncio.wait_for(receiver.recv_multipart(), SECONDS) == [b"a"]


async def test_messages_that_nobody_receives_do_not_wake_the_loop_again_and_again(
    sender: zmq.Socket[bytes], receiver: zmq.asyncio.Socket
) -> None:
    receive_directly(SimpleNamespace(resources=SimpleNamespace(output_socket=receiver)))
    sender.send_multipart([b"a"])
    await asyncio.wait_for(receiver.recv_multipart(), SECONDS)
    sender.send_multipart([b"b"])
    sender.close(linger=0)
    await asyncio.sleep(0.1)
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.3


async def test_a_closed_socket_is_not_waited_for(receiver: zmq.asyncio.Socket) -> None:
    receive_directly(SimpleNamespace(resources=SimpleNamespace(output_socket=receiver)))
    file = cast(int, receiver.getsockopt(zmq.FD))
    waiting: asyncio.Future[list[bytes]] = asyncio.ensure_future(receiver.recv_multipart())
    await asyncio.sleep(0)
    receiver.close(linger=0)
    receiver.close(linger=0)
    assert receiver.closed
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not asyncio.get_running_loop().remove_reader(file)


async def test_a_client_without_such_a_socket_is_left_alone() -> None:
    receive_directly(SimpleNamespace(resources=SimpleNamespace(engine_dead=False)))
