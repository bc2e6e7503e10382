"""slime and miles: a facade with the routes of SGLang's server that their rollouts call, as an ASGI app.

```sh
DARTS_URL=http://127.0.0.1:8000 uvicorn --factory darts_client.integrations.slime:facade --port 30000
# slime: --sglang-router-ip 127.0.0.1 --sglang-router-port 30000
```

It answers to its addresses, `localhost`, and the names in DARTS_FACADE_HOSTS, separated by commas.

Read from slime 0.3.1 and miles 0.1.0 (August 2026), whose packages are not needed.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import httpx

from .._errors import DartsError
from ._sampling import Sampler
from ._web import Json, JsonApp, Route

NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
NAMES |= {"no_stop_trim": "include_stop_str_in_output"}
"""SGLang's names of sampling parameters, where they are not vLLM's."""
UNSERVED = ("stream", "image_data", "return_routed_experts", "return_indexer_topk", "lora_path")
PAUSES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
WEIGHTS = "/darts/v1/weights"


class Facade(JsonApp):
    """SGLang's routes in front of the server at `url`; its key needs admin rights for aborts, pauses and weights."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        hosts: Collection[str] = (),
    ) -> None:
        self._sampler = Sampler(url, api_key, None, transport)
        self._running = 0
        self._last_version: Json = {}
        safe: dict[str, Route] = {
            "/get_weight_version": self._version,
            "/workers": self._workers,
            "/list_workers": self._workers,
            "/v1/loads": self._loads,
            "/flush_cache": self._loads,  # nothing to do: an update clears the caches
            "/health": self._version,
            "/health_generate": self._version,
        }
        changing: dict[str, Route] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": lambda *_: self._forward("/resume"),
            "/update_weights_from_disk": self._load,
        }
        super().__init__(changing | safe, safe, hosts)

    async def _generate(self, body: Json, headers: Mapping[str, str]) -> Json:
        if unserved := [name for name in UNSERVED if body.get(name)]:
            raise ValueError(f"{', '.join(unserved)}: not served; remove it")
        params = {NAMES.get(name, name): value for name, value in body["sampling_params"].items()}
        prompt, session = body.get("input_ids") or body["text"], headers.get("x-smg-routing-key")
        self._running += 1
        try:
            answer = await self._sampler.sample(prompt, params, session=session, request_id=body.get("rid"))
        finally:
            self._running -= 1
        logprobs = zip(answer.token_logprobs, answer.token_ids, strict=True)
        meta = {"id": body.get("rid"), "finish_reason": {"type": answer.finish_reason}}
        meta |= {"prompt_tokens": answer.prompt_tokens, "completion_tokens": len(answer.token_ids), "cached_tokens": 0}
        with suppress(DartsError):  # no reason to lose the trajectory
            self._last_version = await self._version()
        meta |= self._last_version  # of the end of the answer, as SGLang's
        meta["output_token_logprobs"] = [[value, token, None] for value, token in logprobs]
        return {"text": answer.text, "output_ids": list(answer.token_ids), "meta_info": meta}

    async def _abort(self, body: Json, _: Any) -> Json:
        ids = {} if body.get("abort_all") else {"request_ids": [f"cmpl-{body['rid']}-0"]}
        return await self._forward("/abort_requests", ids)

    async def _pause(self, body: Json, _: Any) -> Json:
        return await self._forward(f"/pause?mode={PAUSES[body.get('mode', 'abort')]}")

    async def _load(self, body: Json, _: Any) -> Json:
        version = {"version": int(body["weight_version"])} if body.get("weight_version") else {}
        return await self._forward(WEIGHTS, {"path": body["model_path"], "rule": "keep", **version}) | {"success": True}

    async def _version(self, *_: Any) -> Json:
        return {"weight_version": str((await self._sampler.request("GET", WEIGHTS)).json()["version"])}

    async def _workers(self, _: Json, headers: Mapping[str, str]) -> Json:
        url = f"http://{headers['host']}"
        return {"workers": [{"id": "darts", "url": url}], "urls": [url]}

    async def _loads(self, *_: Any) -> Json:
        return {"loads": [{"num_reqs": self._running}]}

    async def _forward(self, path: str, body: Json | None = None) -> Json:
        return dict((await self._sampler.request("POST", path, json=body or {})).json())


def facade() -> Facade:
    """Create the app from DARTS_URL, DARTS_API_KEY and DARTS_FACADE_HOSTS."""
    hosts = os.environ.get("DARTS_FACADE_HOSTS", "").split(",")
    return Facade(os.environ["DARTS_URL"], os.environ.get("DARTS_API_KEY"), hosts=hosts)
