"""Who may call each route, vLLM's and ours.

A test builds the whole app and fails for a route that is missing here. At run time such a route is for admins only.
"""

from starlette.routing import compile_path

from darts_server.http.security.access import RouteAccess

ANY = "*"
"""Any method."""

PUBLIC = {
    "/health": "GET",  # probes send no key
    "/ping": "GET POST",  # the same for SageMaker
    "/version": "GET",  # the source shows it too
    "/metrics": "GET",  # scrapers mostly send no key; it contains no prompt or caller
    "/metrics{rest:path}": ANY,  # as vLLM mounts it
    "/darts": "GET",  # redirects to /darts/
    "/darts/": "GET",  # only the page: it asks for a key and sends it with its requests
    # The API's description, the same for everyone who has the source.
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
    "/darts/v1/groups/{group_id:path}": "GET",
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
    "/v1/systemone": "POST",
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
    # Of --dialect.
    "/finish_session": "POST",  # the caller's own
}
ADMIN = {
    "/darts/v1/state": "PUT",
    "/darts/v1/policy": "PATCH",
    "/darts/v1/weights": "PUT POST",
    "/darts/v1/weights/lora/{name}": "PUT POST DELETE",
    "/pause": "POST",
    "/resume": "POST",
    "/abort_requests": "POST",  # without ids it aborts all requests
    "/inference/v1/abort_requests": "POST",  # by ids, which may be others'
    "/init_weight_transfer_engine": "POST",
    "/shutdown_weight_transfer_engine": "POST",
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
    "/server_info": "GET",  # shows all flags and the environment
    # These load a LoRA adapter from a path given by the caller.
    "/v1/load_lora_adapter": "POST",
    "/v1/unload_lora_adapter": "POST",
    "/adapters": "POST",
    "/adapters/{adapter_name}": "DELETE",
    # Of --dialect.
    "/load_lora_adapter": "POST",
    "/skyrl/v1/load_lora_adapter": "POST",
    "/areal_pause_generation": "POST",
    "/areal_continue_generation": "POST",
    "/areal_update_weights": "POST",
    "/areal_update_weights_lora": "POST",
    "/areal_init_weights_update_group": "POST",
    "/areal_set_update_weight_meta": "POST",
    "/areal_update_weights_xccl": "POST",
    "/areal_set_update_weight_meta_lora": "POST",
    "/areal_update_weights_lora_xccl": "POST",
}
DANGEROUS = {
    "/collective_rpc": "POST",  # calls any method of the workers with any arguments
    "/weight_checker": "POST",  # one of its actions sets all weights to zero, while groups run
    "/start_profile": "POST",  # writes traces without limit, and slows all requests
    "/stop_profile": "POST",
}
TABLE = {RouteAccess.PUBLIC: PUBLIC, RouteAccess.USE: USE, RouteAccess.ADMIN: ADMIN, RouteAccess.DANGEROUS: DANGEROUS}

OWN_LIMITS = {
    ("PUT", "/darts/v1/weights"),
    ("PUT", "/darts/v1/weights/lora/{name}"),
    ("PUT", "/darts/v1/state"),
}
"""Routes that limit their large bodies themselves, by the size of the model or of the state."""


# Compiled as the router does it, so that no spelling of a path matches here and another route there.
_ROUTES = [
    (compile_path(template)[0], frozenset(methods.split()), access)
    for access, routes in TABLE.items()
    for template, methods in routes.items()
]
_OWN_LIMITS = [(method, compile_path(template)[0]) for method, template in OWN_LIMITS]


def access_of(method: str, path: str) -> RouteAccess | None:
    """Return who may call the route that a request matches; ``None`` if the table has no such route."""
    # Not cached by path: callers without a key choose it, at any length.
    method = "GET" if method == "HEAD" else method
    for pattern, methods, access in _ROUTES:
        if (method in methods or ANY in methods) and pattern.match(path):
            return access
    return None


def has_own_limits(method: str, path: str) -> bool:
    """Return whether the route that a request matches limits its body itself."""
    return any(method == each and pattern.match(path) for each, pattern in _OWN_LIMITS)
