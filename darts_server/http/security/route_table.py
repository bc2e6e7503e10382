"""Access of each route, vLLM's and ours.

A route that is missing here is for admins only. A test builds the whole app, and fails for such a route.
"""

from darts_server.http.security.access import RouteAccess

ANY = "*"

PUBLIC = {
    # Probes send no key. SageMaker calls /ping.
    "/health": "GET",
    "/ping": "GET POST",
    "/version": "GET",
    # Scrapers mostly send no key, and metrics name no prompt or caller. vLLM mounts all paths that begin so.
    "/metrics": "GET",
    "/metrics{rest:path}": ANY,
    # The page, and redirects to it. The page asks for a key, and sends the key with its requests.
    "/": "GET",
    "/darts": "GET",
    "/darts/": "GET",
    # The description of the API, which is the same as in the source.
    "/openapi.json": "GET",
    "/docs": "GET",
    "/docs/oauth2-redirect": "GET",
    "/redoc": "GET",
    "/static{rest:path}": ANY,
}


def _routes(methods: str, paths: str) -> dict[str, str]:
    """Map paths to their methods, both separated by spaces."""
    return dict.fromkeys(paths.split(), methods)


USE = {
    "/darts/v1/rollouts": "POST",
    "/darts/v1/rollouts/{batch_id}": "GET DELETE",
    "/darts/v1/sessions": "POST",
    "/darts/v1/sessions/{session_id}:end": "POST",
    "/darts/v1/sessions/{session_id}": "GET",
    "/darts/v1/sessions/{session_id}/events": "GET",
    "/darts/v1/session-groups/{group_id}": "GET DELETE",
    "/darts/v1/session-groups/{group_id}/events": "GET",
    "/darts/v1/vote": "POST",
    "/darts/v1/rewards": "POST",
    "/darts/v1/groups": "GET",
    "/darts/v1/groups/{group_id:path}": "GET",
    "/darts/v1/prompts/{prompt_key:path}": "GET",
    "/darts/v1/state": "GET",
    "/darts/v1/policy": "GET",
    "/darts/v1/policy/schema": "GET",
    "/darts/v1/weights": "GET",
    "/darts/v1/live": "GET",
    "/v1/realtime": "WEBSOCKET",
    "/v1/responses/{response_id}": "GET",
    # Of --dialect. It forgets a session of the caller.
    "/finish_session": "POST",
    **_routes(
        "POST",
        """
        /v1/completions /v1/completions/render /v1/completions/derender
        /v1/chat/completions /v1/chat/completions/batch /v1/chat/completions/render /v1/chat/completions/derender
        /v1/responses /v1/responses/render /v1/responses/{response_id}/cancel
        /v1/messages /v1/messages/count_tokens /v1/messages/render
        /v1/audio/transcriptions /v1/audio/translations
        /v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank
        /cohere/v2/chat /inference/v1/generate /invocations /generative_scoring /v1/systemone
        /v1/decisions
        /tokenize /detokenize /is_scaling_elastic_ep
        """,
    ),
    **_routes(
        "GET",
        """
        /v1/models /tokenizer_info /load /kv_event_sources /get_world_size /is_paused /is_sleeping /weight_info
        /fault_tolerance/status
        """,
    ),
}
ADMIN = {
    "/darts/v1/state": "PUT",
    "/darts/v1/policy": "PATCH",
    "/darts/v1/weights": "PUT POST",
    "/darts/v1/weights/lora/{name}": "PUT POST DELETE",
    # They abort the requests of any caller.
    "/abort_requests": "POST",
    "/inference/v1/abort_requests": "POST",
    # It shows all flags and the environment.
    "/server_info": "GET",
    "/adapters/{adapter_name}": "DELETE",
    # Some load a LoRA adapter from a path of the caller's choice. From /load_lora_adapter on, the routes are of
    # --dialect.
    **_routes(
        "POST",
        """
        /pause /resume /sleep /wake_up /release_kv_cache_memory /scale_elastic_ep /fault_tolerance/apply
        /init_weight_transfer_engine /shutdown_weight_transfer_engine
        /start_weight_update /start_draft_weight_update /update_weights /finish_weight_update /update_weight_version
        /reset_prefix_cache /reset_mm_cache /reset_encoder_cache
        /v1/load_lora_adapter /v1/unload_lora_adapter /adapters /load_lora_adapter /skyrl/v1/load_lora_adapter
        /areal_pause_generation /areal_continue_generation /areal_update_weights /areal_update_weights_lora
        /areal_init_weights_update_group /areal_set_update_weight_meta /areal_update_weights_xccl
        /areal_set_update_weight_meta_lora /areal_update_weights_lora_xccl
        """,
    ),
}
DANGEROUS = {
    # It calls any method of the workers with any arguments.
    "/collective_rpc": "POST",
    # One of its actions sets all weights to zero while groups run.
    "/weight_checker": "POST",
    # They write traces without limit, and slow all requests.
    "/start_profile": "POST",
    "/stop_profile": "POST",
}
TABLE = {RouteAccess.PUBLIC: PUBLIC, RouteAccess.USE: USE, RouteAccess.ADMIN: ADMIN, RouteAccess.DANGEROUS: DANGEROUS}

OWN_LIMITS = {
    ("PUT", "/darts/v1/weights"),
    ("PUT", "/darts/v1/weights/lora/{name}"),
    ("PUT", "/darts/v1/state"),
}
"""Routes that limit their bodies themselves, by the size of the model or the state."""
