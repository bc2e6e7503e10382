"""What an ingress does with each route."""

import re
from enum import Enum
from functools import cache

from starlette.routing import compile_path

from darts_server.http.security.access import RouteAccess
from darts_server.http.security.route_table import ADMIN, DANGEROUS, access_of

ANY = "*"


class Handling(Enum):
    """What is done with a request."""

    GENERATE = "generate"
    """It runs on one replica, chosen by its prompt and by load."""
    ANY = "any"
    """Any replica answers it, as they are all alike in this."""
    FIND = "find"
    """It names something that one replica has."""
    ALL = "all"
    """It concerns all replicas, and changes or describes each of them."""
    BATCH = "batch"
    REWARDS = "rewards"
    GROUPS = "groups"
    PROMPT = "prompt"
    HEALTH = "health"
    METRICS = "metrics"
    LIVE = "live"
    PAGE = "page"
    """The ingress has it itself."""
    WEIGHTS = "weights"
    """It changes the weights of all replicas, in two steps."""
    TRAINER_WEIGHTS = "trainer_weights"
    """It changes weights step by step, or by a transfer that each server takes part in."""
    ONE_SERVER = "one_server"
    """It is each server's own."""


WEIGHTS = {"/darts/v1/weights": "PUT POST", "/darts/v1/weights/lora/{name}": "PUT POST"}
TRAINER_WEIGHTS = {
    "/darts/v1/weights/staged/{staged_id}:switch": "POST",
    "/darts/v1/weights/staged/{staged_id}": "DELETE",
    "/init_weight_transfer_engine": ANY,
    "/start_weight_update": ANY,
    "/start_draft_weight_update": ANY,
    "/update_weights": ANY,
    "/finish_weight_update": ANY,
    "/areal_update_weights": ANY,
    "/areal_update_weights_lora": ANY,
    "/areal_init_weights_update_group": ANY,
    "/areal_set_update_weight_meta": ANY,
    "/areal_update_weights_xccl": ANY,
    "/areal_set_update_weight_meta_lora": ANY,
    "/areal_update_weights_lora_xccl": ANY,
}
ONE_SERVER = {
    "/darts/v1/state": ANY,
    "/darts/v1/observations": ANY,
    "/darts/v1/rollouts/{batch_id}/deadline": ANY,
    "/scale_elastic_ep": ANY,
    "/v1/realtime": "WEBSOCKET",
}
OURS = {
    Handling.HEALTH: {"/health": "GET", "/ping": "GET POST"},
    Handling.METRICS: {"/metrics": "GET", "/metrics/": "GET"},
    Handling.LIVE: {"/darts/v1/live": "GET"},
    Handling.PAGE: {"/darts": "GET", "/darts/": "GET"},
    Handling.BATCH: {"/darts/v1/rollouts": "POST"},
    Handling.REWARDS: {"/darts/v1/rewards": "POST"},
    Handling.GROUPS: {"/darts/v1/groups/{group_id:path}": "GET"},
    Handling.PROMPT: {"/darts/v1/prompts/{prompt_key:path}": "GET"},
    Handling.FIND: {
        "/darts/v1/rollouts/{batch_id}": "GET DELETE",
        "/v1/responses/{response_id}": "GET",
        "/v1/responses/{response_id}/cancel": "POST",
    },
    Handling.WEIGHTS: WEIGHTS,
    Handling.TRAINER_WEIGHTS: TRAINER_WEIGHTS,
    Handling.ONE_SERVER: ONE_SERVER,
    Handling.ANY: {"/darts/v1/weights/tensors": "GET", "/darts/v1/rollouts/plan": "POST"},
    Handling.ALL: {
        "/darts/v1/weights": "GET",
        "/is_paused": "GET",
        "/is_sleeping": "GET",
        "/weight_info": "GET",
        "/load": "GET",
        "/fault_tolerance/status": "GET",
        "/is_scaling_elastic_ep": "POST",
        "/finish_session": "POST",
        **{path: methods for path, methods in (ADMIN | DANGEROUS).items() if path not in WEIGHTS},
        "/darts/v1/weights/lora/{name}": "DELETE",
    },
    Handling.GENERATE: {
        "/v1/completions": "POST",
        "/v1/chat/completions": "POST",
        "/v1/chat/completions/batch": "POST",
        "/v1/responses": "POST",
        "/v1/messages": "POST",
        "/inference/v1/generate": "POST",
        "/invocations": "POST",
        "/generative_scoring": "POST",
        "/darts/v1/vote": "POST",
    },
}
"""The first that matches counts; all other routes are answered by any replica."""


def handling_of(method: str, path: str) -> Handling:
    """Return what is done with a request."""
    method = "GET" if method == "HEAD" else method
    for pattern, methods, handling in _patterns():
        if (method in methods or ANY in methods) and pattern.match(path):
            return handling
    return Handling.ANY


def is_public(method: str, path: str) -> bool:
    """Whether everyone may call a route, under any name of the server."""
    return access_of(method, path) is RouteAccess.PUBLIC


@cache
def _patterns() -> list[tuple[re.Pattern[str], frozenset[str], Handling]]:
    return [
        (compile_path(template)[0], frozenset(methods.split()), handling)
        for handling, routes in OURS.items()
        for template, methods in routes.items()
    ]
