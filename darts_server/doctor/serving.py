"""Check a server's settings and vLLM flags before it starts."""

from argparse import Namespace
from collections.abc import Iterator

from darts_server.doctor.findings import Finding, fail, ok, warn
from darts_server.doctor.folders import check_state, check_weights
from darts_server.doctor.machine import check_machine
from darts_server.exceptions import InvalidSetting
from darts_server.http.security.access import Access, check_listening
from darts_server.settings import Settings


def check_local(settings: Settings, args: Namespace) -> Iterator[Finding]:
    """Run the checks that take no time and no network."""
    yield from check_machine(None if args.uds else args.host, args.port)
    yield check_state(settings.state_dir)
    from darts_server.vllm import checks

    yield from check_weights(settings.weights_root, settings.weights_staging, checks.model_bytes(args))
    yield check_probe(settings, checks.probe_fault(args))


def check_vllm(args: Namespace, has_model: bool) -> Iterator[Finding]:
    """Check vLLM, its devices and, if the command line names one, the model."""
    from darts_server.vllm import checks

    version, warning = checks.version()
    yield ok("vLLM", version) if warning is None else warn("vLLM", warning)
    devices, fault = checks.devices()
    yield ok("devices", devices) if fault is None else fail("devices", f"{devices}: {fault}")
    if not has_model:
        yield warn("model", "no model given; name one to check it too")
        return
    model, fault = checks.model(args)
    yield ok("model", model) if fault is None else fail("model", f"{model}: {fault}")


def check_address(args: Namespace, access: Access, allow_unauthenticated: bool) -> Finding:
    """Check who can reach the server, and with which keys."""
    if args.uds:
        return ok("address", f"the socket {args.uds}, for this machine alone")
    try:
        check_listening(args.host, access, allow_unauthenticated)
    except InvalidSetting as error:
        return fail("address", str(error))
    keys = "with keys" if access.keys else "without API keys"
    if allow_unauthenticated and not access.keys:
        return warn("address", f"{args.host}, {keys} (--allow-unauthenticated): whoever reaches it may use it")
    return ok("address", f"{args.host}, {keys}, {'with' if access.admin_keys else 'without'} admin keys")


def check_probe(settings: Settings, fault: str | None) -> Finding:
    """Check whether the quality head can get hidden states, as far as flags show."""
    needed = "arrol" in settings.policy and "head" in settings.quality
    if fault is None:
        return ok("probe", "available" if needed else "not needed by the default policy")
    if not needed:
        return ok("probe", f"not available ({fault}), and not needed")
    if settings.quality_fallback == "refuse":
        return fail("probe", f"--policy {settings.policy} needs hidden states, and {fault}; score by --quality logprob")
    return warn("probe", f"--policy {settings.policy} falls back from hidden states to log-probs: {fault}")
