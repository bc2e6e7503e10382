"""Answers are found in a process of its own, which is ended when a search takes too long."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.policy.voting.answers import TEXT_CHARS
from darts_server.rollout.voting import answer_search
from darts_server.rollout.voting.answer_search import AnswerSearch

pytestmark = pytest.mark.anyio
SLOW = r"([ab])(?:[ab]*a[ab]{300}c)?"
"""Its automaton explodes, and it is tried at each character."""


@asynccontextmanager
async def searching(**options: Any) -> AsyncIterator[AnswerSearch]:
    search = AnswerSearch(**options)
    try:
        yield search
    finally:
        search.close()
        await asyncio.sleep(0)  # the connection is closed in the next turn


def slow_text() -> str:
    return "".join(random.Random(1).choices("ab", k=TEXT_CHARS))


async def test_one_process_is_started_for_the_first_pattern() -> None:
    async with searching() as search:
        assert search.pid is None
        await search.check("#(.)")
        first = search.pid
        assert await search.find("#(.)", "#1 #2") == "2"
        assert await search.find("#(.)", "none") is None
        assert await search.find("#(.)", "#\ud800\n") == "?"
        assert await search.find("boxed", r"\boxed{7}") == "7"
        assert await search.find(["yes", "no"], "no, yes") == "yes"
        assert await search.find("(1)", "1" + "." * TEXT_CHARS) is None
        assert await search.find("((?s:.+))", "\U0001f600" * TEXT_CHARS) == "\U0001f600" * TEXT_CHARS
        assert search.pid == first


async def test_patterns_that_cannot_be_used_are_refused() -> None:
    async with searching() as search:
        for pattern, field in (("(?=a)(b)", "pattern"), ("(\ud800)", "pattern"), ([], "pattern.choices")):
            with pytest.raises(InvalidRequest) as refused:
                await search.check(pattern)
            assert refused.value.field == field
        assert await search.find("#(.)", "#1") == "1"


async def test_a_search_that_takes_too_long_is_ended_and_others_go_on() -> None:
    async with searching(seconds=0.1) as search:
        slow = asyncio.create_task(search.find(SLOW, slow_text()))
        fast = asyncio.create_task(search.find("#(.)", "#1"))
        with pytest.raises(InvalidRequest, match=r"pattern: took more than 0\.1 seconds of processor time"):
            await slow
        assert await fast == "1"


async def test_the_process_is_started_again_after_its_death() -> None:
    async with searching() as search:
        await search.check("#(.)")
        assert search.pid is not None
        os.kill(search.pid, signal.SIGKILL)
        assert await search.find("#(.)", "#1") == "1"


async def test_a_process_that_always_dies_is_an_error() -> None:
    async with searching(command=(sys.executable, "-c", "")) as search:
        with pytest.raises(DartsError, match="died twice"):
            await search.find("#(.)", "#1")


async def test_a_process_that_does_not_reply_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_search, "REPLY_SECONDS", 0.1)
    async with searching(command=(sys.executable, "-c", "input(), input()")) as search:
        with pytest.raises(DartsError, match="did not reply in"):
            await search.find("#(.)", "#1")
        assert search.pid is None


async def test_a_cancelled_search_leaves_no_reply_to_the_next() -> None:
    async with searching(seconds=60.0) as search:
        await search.check("#(.)")
        cancelled = asyncio.create_task(search.find(SLOW, slow_text()))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await search.find("#(.)", "#1") == "1"


def test_the_process_ends_with_its_input() -> None:
    request = b'{"pattern": "#(.)", "text": "#1"}\n'
    ended = subprocess.run([*answer_search.COMMAND, "1"], input=request, capture_output=True, timeout=240, check=True)
    assert (ended.stdout, ended.stderr) == (b'{"answer": "1"}\n', b"")
