"""slime and miles: a facade with the routes of SGLang's server that their rollouts call, as an ASGI app.

```sh
DARTS_URL=http://127.0.0.1:8000 uvicorn --factory darts_client.integrations.slime:facade --port 30000
# slime: --sglang-router-ip 127.0.0.1 --sglang-router-port 30000
```

It answers to its addresses, `localhost`, and the names in DARTS_FACADE_HOSTS, separated by commas.

Read from slime 0.3.1 and miles 0.1.0 (August 2026), whose packages are not needed.
"""

import json
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx

from .._errors import DartsError, StatusError
from ._sampling import Sampler

Json = dict[str, Any]
Route = Callable[[Json, Mapping[str, str]], Awaitable[Json]]
"""Takes a request's body and headers."""

NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
NAMES |= {"no_stop_trim": "include_stop_str_in_output"}
"""SGLang's names of sampling parameters, where they are not vLLM's."""
UNSERVED = ("stream", "image_data", "return_routed_experts", "return_indexer_topk", "lora_path")
PAUSES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
WEIGHTS = "/darts/v1/weights"


class Facade:
    """SGLang's routes in front of the server at `url`; its key needs admin rights for aborts, pauses and weights.

    An ASGI app, closed to web pages: it answers at its addresses, at `localhost`, and at the names `hosts`.
    """

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
        self._hosts = {"localhost", *(host.strip().lower() for host in hosts)}
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
        self._routes, self._safe = changing | safe, safe.keys()  # safe ones change nothing, and take any method

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            status, answer = await self._answer(scope, receive)
            headers = [(b"content-type", b"application/json")] + [(b"allow", b"POST")] * (status == 405)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _answer(self, scope: Any, receive: Any) -> tuple[int, Json]:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if reason := self._refusal(headers):
            return 403, {"error": reason}
        if (route := self._routes.get(scope["path"])) is None:
            return 404, {"error": f"{scope['path']} is not served; there are {', '.join(self._routes)}"}
        if scope["method"] != "POST" and scope["path"] not in self._safe:
            return 405, {"error": f"{scope['path']} takes POST only"}
        body, is_open = b"", True
        while is_open:
            message = await receive()
            body, is_open = body + message.get("body", b""), message.get("more_body", False)
        try:
            return 200, await route(json.loads(body or b"{}"), headers)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"}
        except DartsError as error:
            return (error.status_code if isinstance(error, StatusError) else 502), {"error": str(error)}

    def _refusal(self, headers: Mapping[str, str]) -> str | None:
        """Return why a request is refused that a web page may have sent.

        Browsers name the page in `Origin` or `Sec-Fetch-Site`, but not in a GET of a page whose own name points to this
        machine (DNS rebinding). That name is in `Host`.
        """
        if "origin" in headers or "sec-fetch-site" in headers:
            return "web pages may not call this: it may have an admin key"
        host = headers.get("host")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if host is None or name in self._hosts or ip_address(name):
                return None
        except ValueError:
            pass
        return f"this does not answer to the name {str(host)[:100]!r}; use its address, or add the name to its hosts"

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
