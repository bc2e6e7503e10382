"""slime and miles: a facade with the routes of SGLang's server that their rollouts call, as an ASGI app.

```sh
DARTS_URL=http://127.0.0.1:8000 uvicorn --factory darts_client.integrations.slime:facade --port 30000
# slime: --sglang-router-ip 127.0.0.1 --sglang-router-port 30000
```

The facade answers to its addresses, to `localhost`, and to the names in DARTS_FACADE_HOSTS, separated by commas.

Written for slime 0.3.1 and miles 0.1.0 (August 2026). Their packages are not needed.
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
"""Answers a request from its body and headers."""

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""vLLM's name of each sampling parameter that has another name in SGLang."""
UNSERVED = ("stream", "image_data", "return_routed_experts", "return_indexer_topk", "lora_path")
PAUSES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
"""vLLM's mode of `/pause` for each mode of SGLang's."""
WEIGHTS = "/darts/v1/weights"


class Facade:
    """SGLang's routes in front of the server at `url`, as an ASGI app that is closed to web pages.

    Args:
        api_key: key with admin rights, which aborts, pauses and weights need.
        hosts: names to which the app answers, beside its addresses and `localhost`.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        hosts: Collection[str] = (),
    ) -> None:
        self._sampler = Sampler(url, api_key, None, transport)
        self._num_running = 0
        self._last_version: Json = {}
        self._hosts = {"localhost", *(host.strip().lower() for host in hosts)}
        # These routes change nothing, and take any method.
        reading_routes: dict[str, Route] = {
            "/get_weight_version": self._get_weight_version,
            "/workers": self._list_workers,
            "/list_workers": self._list_workers,
            "/v1/loads": self._count_running,
            # Nothing to do, because an update clears the caches.
            "/flush_cache": self._count_running,
            # A cheap request that fails if the server does.
            "/health": self._get_weight_version,
            "/health_generate": self._get_weight_version,
        }
        changing_routes: dict[str, Route] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": lambda *_: self._forward("/resume"),
            "/update_weights_from_disk": self._update_weights,
        }
        self._routes = changing_routes | reading_routes
        self._reading_paths = reading_routes.keys()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # `lifespan` needs no answer.
        if scope["type"] != "http":
            return
        status, answer = await self._handle_request(scope, receive)
        headers = [(b"content-type", b"application/json")]
        if status == 405:
            headers.append((b"allow", b"POST"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _handle_request(self, scope: Any, receive: Any) -> tuple[int, Json]:
        path = scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if reason := self._find_refusal_reason(headers):
            return 403, {"error": reason}
        route = self._routes.get(path)
        if route is None:
            return 404, {"error": f"{path} is not served; there are {', '.join(self._routes)}"}
        if scope["method"] != "POST" and path not in self._reading_paths:
            return 405, {"error": f"{path} takes POST only"}

        body = b""
        has_more = True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        try:
            return 200, await route(json.loads(body or b"{}"), headers)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"}
        except StatusError as error:
            return error.status_code, {"error": str(error)}
        except DartsError as error:
            return 502, {"error": str(error)}

    def _find_refusal_reason(self, headers: Mapping[str, str]) -> str | None:
        # A browser adds these headers to the requests of web pages.
        if "origin" in headers or "sec-fetch-site" in headers:
            return "web pages may not call this: it may have an admin key"
        # Browsers send neither header in a GET of a page whose own name points to this machine (DNS rebinding). The
        # page's name is in `Host`.
        host = headers.get("host")
        if host is None:
            return None
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name not in self._hosts:
                # Any address is allowed. Other names raise ValueError.
                ip_address(name)
        except ValueError:
            return f"this does not answer to the name {host[:100]!r}; use its address, or add the name to its hosts"
        return None

    async def _generate(self, body: Json, headers: Mapping[str, str]) -> Json:
        unserved = [name for name in UNSERVED if body.get(name)]
        if unserved:
            raise ValueError(f"{', '.join(unserved)}: not served; remove it")
        sampling = {NAMES.get(name, name): value for name, value in body["sampling_params"].items()}
        prompt = body.get("input_ids") or body["text"]
        session = headers.get("x-smg-routing-key")
        request_id = body.get("rid")
        self._num_running += 1
        try:
            answer = await self._sampler.sample(
                prompt,
                sampling,
                session=session,
                request_id=request_id,
            )
        finally:
            self._num_running -= 1

        # A failure here is no reason to lose the trajectory. SGLang, too, reports the version at the end of an answer.
        with suppress(DartsError):
            self._last_version = await self._get_weight_version()
        logprobs = zip(answer.token_logprobs, answer.token_ids, strict=True)
        meta_info = {
            "id": request_id,
            "finish_reason": {"type": answer.finish_reason},
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": 0,
            **self._last_version,
            "output_token_logprobs": [[logprob, token_id, None] for logprob, token_id in logprobs],
        }
        return {"text": answer.text, "output_ids": list(answer.token_ids), "meta_info": meta_info}

    async def _abort(self, body: Json, _: Any) -> Json:
        if body.get("abort_all"):
            return await self._forward("/abort_requests")
        # vLLM names the engine's request of a completion's first prompt so.
        return await self._forward("/abort_requests", {"request_ids": [f"cmpl-{body['rid']}-0"]})

    async def _pause(self, body: Json, _: Any) -> Json:
        return await self._forward(f"/pause?mode={PAUSES[body.get('mode', 'abort')]}")

    async def _update_weights(self, body: Json, _: Any) -> Json:
        update = {"path": body["model_path"], "rule": "keep"}
        if body.get("weight_version"):
            update["version"] = int(body["weight_version"])
        return await self._forward(WEIGHTS, update) | {"success": True}

    async def _get_weight_version(self, *_: Any) -> Json:
        response = await self._sampler.request("GET", WEIGHTS)
        return {"weight_version": str(response.json()["version"])}

    async def _list_workers(self, _: Json, headers: Mapping[str, str]) -> Json:
        url = f"http://{headers['host']}"
        return {"workers": [{"id": "darts", "url": url}], "urls": [url]}

    async def _count_running(self, *_: Any) -> Json:
        return {"loads": [{"num_reqs": self._num_running}]}

    async def _forward(self, path: str, body: Json | None = None) -> Json:
        response = await self._sampler.request("POST", path, json=body or {})
        return dict(response.json())


def facade() -> Facade:
    """Create the app from DARTS_URL, DARTS_API_KEY and DARTS_FACADE_HOSTS."""
    hosts = os.environ.get("DARTS_FACADE_HOSTS", "").split(",")
    return Facade(os.environ["DARTS_URL"], os.environ.get("DARTS_API_KEY"), hosts=hosts)
