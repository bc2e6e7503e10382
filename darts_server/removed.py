"""What earlier versions had and this one has not, and what to use instead. To be dropped with 0.2."""

import re
from collections.abc import Mapping

QUEUE = (
    'the server keeps no queue: send batches to POST /darts/v1/rollouts with num_groups and "carry": "resume", or let '
    "client.stream(prompts, ahead=N) run prompts ahead"
)
REPLICAS = "one server has all groups, and several engines: use darts-server serve MODEL --replicas N"
PUSH = "push weights with PUT /darts/v1/weights, or load them from a folder below --weights-root"
BESIDE = "an update fetches and checks the new weights beside running groups anyway"
STAGING = ("stage", "expires_after")
NOT_STAGED = f"leave it out: {BESIDE}"

SETTINGS: Mapping[str, str] = {
    "queue_prompts": QUEUE,
    "queue_bytes": QUEUE,
    "queue_lease_seconds": QUEUE,
    "weights_hosts": PUSH,
    "target_positive_ratio": "leave it out: in the formula of the ARRoL paper it has no effect",
    "survival": "leave it out: the formula of the ARRoL paper is the only one",
    "roulette_loss": "leave it out: there is no roulette; the policy arrol prunes by quality",
    "budget_aversion": "use --policy auto, which weighs shorter groups against time by what it has measured",
}
"""Flags, environment variables and keys of the file, by the name of the setting."""

COMMANDS: Mapping[str, str] = {"ingress": REPLICAS}
"""Commands of ``darts-server``."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "policy": {
        "first_finish": "use darts with --tail longest",
        "darts_deadline": "use darts_cut, or darts with --tail longest",
        "roulette": "use arrol, or uniform with weights",
        "balanced": "use arrol, which returns all candidates that are not pruned, or a sample of them",
        "shadow:*": "use off, which records lengths: darts-server trace export writes them, and darts-server simulate "
        "says what a policy would do; or auto",
    },
    "auto_allow": dict.fromkeys(("defer", "uniform,darts,defer"), "name restart in place of defer"),
    "budget": {"utility": "use the policy auto, or the budget fixed or cv_log"},
}
"""Values of settings that stay. ``*`` stands for the rest of a value."""

ROUTES: Mapping[str, str] = {
    r"/darts/v1/queue(/.*)?": QUEUE,
    r"/darts/v1/rollouts/plan": REPLICAS,
    r"/darts/v1/rollouts/.+/deadline": REPLICAS,
    r"/darts/v1/observations": REPLICAS,
    r"/darts/v1/weights/staged/.*": f"use PUT /darts/v1/weights: {BESIDE}",
    r"/darts/v1/weights/tensors": "save the weights in the trainer",
    r"/darts/v1/trajectories/.+:abort": "abort a whole batch with DELETE /darts/v1/rollouts/ID, or requests of vLLM's "
    "routes with POST /abort_requests, which needs an admin key",
}
"""By a pattern of the path."""

FIELDS: Mapping[tuple[str, str], str] = {
    ("RolloutsIn", "partial"): "leave it out: what pruned candidates had generated is not kept; the weights of the "
    "returned trajectories make up for them",
    ("RolloutsIn", "cohort"): REPLICAS,
    ("WeightsIn", "url"): "the server does not pull weights: push them with PUT /darts/v1/weights, or name a file or "
    'folder below --weights-root as {"path": …}',
    **{(model, name): NOT_STAGED for model in ("WeightsIn", "LoraIn") for name in STAGING},
}
"""Fields of request bodies, by the model of the body."""

PARAMETERS: Mapping[tuple[str, str], str] = {
    ("PUT /darts/v1/state", "if_new"): REPLICAS,
    **{(f"PUT /darts/v1/weights{path}", name): NOT_STAGED for path in ("", "/lora/{name}") for name in STAGING},
}
"""Query parameters, by the route."""


def value_remedy(setting: str, value: object) -> str | None:
    """Return what to use instead of a setting's value; ``None`` if it was never there."""
    for pattern, remedy in VALUES.get(setting, {}).items():
        if isinstance(value, str) and (value == pattern or (pattern[-1] == "*" and value.startswith(pattern[:-1]))):
            return remedy
    return None


def route_remedy(path: str) -> str | None:
    """Return what to use instead of a route; ``None`` if it was never there."""
    return next((remedy for pattern, remedy in ROUTES.items() if re.fullmatch(pattern, path)), None)
