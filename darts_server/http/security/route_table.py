"""Who may call each route, vLLM's and ours.

A test builds the whole app and fails for a route that is missing here. At run time such a route is for admins only.
"""

from darts_server.http.security.access import RouteAccess

ANY = "*"
"""Any method."""

PUBLIC = {
    "/health": "GET",  # probes send no key
    "/ping": "GET POST",  # the same for SageMaker
    "/version": "GET",  # the source shows it too
    "/metrics": "GET",  # scrapers mostly send no key; it contains no prompt or caller
    "/metrics{rest:path}": ANY,  # as vLLM mounts it
    "/": "GET",  # redirects to /darts/
    "/darts": "GET",  # the same
    "/darts/": "GET",  # only the page: it asks for a key and sends it with its requests
    # The API's description, the same for everyone who has the source.
    "/openapi.json": "GET",
    "/docs": "GET",
    "/docs/oauth2-redirect": "GET",
    "/redoc": "GET",
    "/static{rest:path}": ANY,
}


def _routes(methods: str, paths: str) -> dict[str, str]:
    return dict.fromkeys(paths.split(), methods)


USE = {
    "/darts/v1/rollouts": "POST",
    "/darts/v1/rollouts/{batch_id}": "GET DELETE",
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
    "/finish_session": "POST",  # of --dialect; the caller's own
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
    "/abort_requests": "POST",  # without ids it aborts all requests
    "/inference/v1/abort_requests": "POST",  # by ids, which may be others'
    "/server_info": "GET",  # shows all flags and the environment
    "/adapters/{adapter_name}": "DELETE",
    # Some load a LoRA adapter from a path given by the caller. From /load_lora_adapter on they are of --dialect.
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
