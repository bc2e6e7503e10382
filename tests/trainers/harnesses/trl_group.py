"""The example `trl_sessions`: TRL's asynchronous loop runs a group by itself, and scores the selected trajectories."""

import asyncio
import json
import random
from typing import Any

import aiohttp
from accelerate import PartialState

from examples import trl_sessions
from tests.trainers.harnesses.group import FINAL_SHARE, SIZE, TURNS, parse_args
from tests.trainers.harnesses.trl import make_calculating_loop


async def main() -> None:
    url = parse_args().url
    trl_sessions.SIZE = SIZE
    loop = make_calculating_loop(url, len(TURNS), max(TURNS), trl_sessions.SessionLoop)
    read = loop.tokenizer.parse_response

    def parse_response(ids: list[int], **more: Any) -> dict[str, Any]:
        message: dict[str, Any] = read(ids, **more)
        if random.random() < FINAL_SHARE:
            message.pop("tool_calls", None)
        return message

    loop.tokenizer.parse_response = parse_response
    loop.reward_funcs = [lambda completions, **_: [1.0 if each else None for each in completions]]
    stop = asyncio.Event()
    async with aiohttp.ClientSession() as loop.session:
        generating = asyncio.create_task(loop._generate_loop(stop))
        while not loop._inflight:
            await asyncio.sleep(0)
        stop.set()  # after one group
        await generating
        group = loop._groups_to_score.get_nowait()
        samples = await loop._score_group(group)
    trained = [int(sample.completion_mask.sum()) for sample in samples]
    # A trajectory whose history was tokenized in another way is several samples.
    print(json.dumps({"trajectories": sum(map(bool, group.completions)), "trained": trained}))
    loop._tool_pool.shutdown()
    loop._loop.close()


if __name__ == "__main__":
    PartialState()
    asyncio.run(main())
