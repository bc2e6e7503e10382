"""Which route is whose: vLLM's and ours.

A test builds the whole app and fails for a route that is not here. At run time such a route is for admins.
"""

import re
from functools import cache

from darts_server.http.security.access import Kind

ANY = "*"
"""Whatever the method."""

PUBLIC = {
    "/health": "GET",  # probes send no key
    "/ping": "GET POST",  # the same for SageMaker
    "/version": "GET",  # as the source tells it
    "/metrics": "GET",  # scrapers mostly send none; no prompt or caller is in it
    "/metrics{rest:path}": ANY,  # as vLLM mounts it
    "/darts": "GET",  # leads there
    "/darts/": "GET",  # the page alone: it asks for a key itself, and sends it with its requests
    # What the API is, the same for everyone with the source.
    "/openapi.json": "GET",
    "/docs": "GET",
    "/docs/oauth2-redirect": "GET",
    "/redoc": "GET",
    "/static{rest:path}": ANY,
}
USE = {
    "/darts/v1/rollouts": "POST",
    "/darts/v1/rollouts/{batch_id}": "GET DELETE",
    "/darts/v1/vote": "POST",
    "/darts/v1/rewards": "POST",
    "/darts/v1/groups/{group_id}": "GET",
    "/darts/v1/prompts/{prompt_key:path}": "GET",
    "/darts/v1/state": "GET",
    "/darts/v1/policy": "GET",
    "/darts/v1/policy/schema": "GET",
    "/darts/v1/weights": "GET",
    "/darts/v1/live": "GET",
    "/v1/models": "GET",
    "/v1/completions": "POST",
    "/v1/completions/render": "POST",
    "/v1/completions/derender": "POST",
    "/v1/chat/completions": "POST",
    "/v1/chat/completions/batch": "POST",
    "/v1/chat/completions/render": "POST",
    "/v1/chat/completions/derender": "POST",
    "/v1/responses": "POST",
    "/v1/responses/render": "POST",
    "/v1/responses/{response_id}": "GET",
    "/v1/responses/{response_id}/cancel": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
    "/v1/messages/render": "POST",
    "/v1/audio/transcriptions": "POST",
    "/v1/audio/translations": "POST",
    "/v1/realtime": "WEBSOCKET",
    "/v1/embeddings": "POST",
    "/v2/embed": "POST",
    "/pooling": "POST",
    "/classify": "POST",
    "/score": "POST",
    "/v1/score": "POST",
    "/rerank": "POST",
    "/v1/rerank": "POST",
    "/v2/rerank": "POST",
    "/cohere/v2/chat": "POST",
    "/inference/v1/generate": "POST",
    "/invocations": "POST",
    "/generative_scoring": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/tokenizer_info": "GET",
    "/load": "GET",
    "/kv_event_sources": "GET",
    "/get_world_size": "GET",
    "/is_paused": "GET",
    "/is_sleeping": "GET",
    "/weight_info": "GET",
    "/is_scaling_elastic_ep": "POST",
    "/fault_tolerance/status": "GET",
}
ADMIN = {
    "/darts/v1/state": "PUT",
    "/darts/v1/policy": "PATCH",
    "/darts/v1/weights": "PUT POST",
    "/darts/v1/weights/lora/{name}": "PUT POST DELETE",
    "/pause": "POST",
    "/resume": "POST",
    "/abort_requests": "POST",  # without ids it aborts everyone's
    "/init_weight_transfer_engine": "POST",
    "/start_weight_update": "POST",
    "/start_draft_weight_update": "POST",
    "/update_weights": "POST",
    "/finish_weight_update": "POST",
    "/update_weight_version": "POST",
    "/reset_prefix_cache": "POST",
    "/reset_mm_cache": "POST",
    "/reset_encoder_cache": "POST",
    "/sleep": "POST",
    "/wake_up": "POST",
    "/release_kv_cache_memory": "POST",
    "/scale_elastic_ep": "POST",
    "/fault_tolerance/apply": "POST",
    "/server_info": "GET",  # all flags, and the environment
    # An adapter is read from a path that the caller names.
    "/v1/load_lora_adapter": "POST",
    "/v1/unload_lora_adapter": "POST",
    "/adapters": "POST",
    "/adapters/{adapter_name}": "DELETE",
}
DANGEROUS = {
    "/collective_rpc": "POST",  # any method of the workers, with any arguments
    "/start_profile": "POST",  # writes traces without end, and slows everyone down
    "/stop_profile": "POST",
}
TABLE = {Kind.PUBLIC: PUBLIC, Kind.USE: USE, Kind.ADMIN: ADMIN, Kind.DANGEROUS: DANGEROUS}

OWN_LIMITS = {
    ("PUT", "/darts/v1/weights"),
    ("PUT", "/darts/v1/weights/lora/{name}"),
    ("PUT", "/darts/v1/state"),
}
"""Routes that hold large bodies to limits of their own: the model's size, the largest state."""


def kind_of(method: str, path: str) -> Kind | None:
    """Whose the route of a request is; ``None`` for one that is not in the table."""
    method = "GET" if method == "HEAD" else method
    for methods, kind in _exact().get(path, ()):
        if method in methods or ANY in methods:
            return kind
    for expression, methods, kind in _patterns():
        if (method in methods or ANY in methods) and expression.fullmatch(path):
            return kind
    return None


def has_own_limits(method: str, path: str) -> bool:
    """Whether the route of a request holds its body to a limit itself."""
    return any(method == each and expression.fullmatch(path) for each, expression in _own_limits())


def kind_of_route(method: str, template: str) -> Kind | None:
    """The same for a route as it is declared, such as ``/darts/v1/groups/{group_id}``."""
    for kind, routes in TABLE.items():
        if method in (methods := routes.get(template, "").split()) or ANY in methods:
            return kind
    return None


@cache
def _exact() -> dict[str, list[tuple[frozenset[str], Kind]]]:
    found: dict[str, list[tuple[frozenset[str], Kind]]] = {}
    for kind, routes in TABLE.items():
        for template, methods in routes.items():
            found.setdefault(template, []).append((frozenset(methods.split()), kind))
    return found


@cache
def _own_limits() -> list[tuple[str, re.Pattern[str]]]:
    return [(method, re.compile(_expression(template), re.DOTALL)) for method, template in sorted(OWN_LIMITS)]


@cache
def _patterns() -> list[tuple[re.Pattern[str], frozenset[str], Kind]]:
    return [
        (re.compile(_expression(template), re.DOTALL), frozenset(methods.split()), kind)
        for kind, routes in TABLE.items()
        for template, methods in routes.items()
        if "{" in template
    ]


def _expression(template: str) -> str:
    """``{name}`` stands for one part of a path, ``{name:path}`` for any number."""
    parts = re.split(r"(\{\w+(?::path)?\})", template)
    return "".join(
        (".*" if part.endswith(":path}") else "[^/]+") if part.startswith("{") else re.escape(part) for part in parts
    )
