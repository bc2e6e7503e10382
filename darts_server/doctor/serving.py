"""All checks of a server that is to be started with these settings and flags."""

from argparse import Namespace
from collections.abc import Iterator

from darts_server.doctor import folders, machine
from darts_server.doctor.findings import Finding, fail, ok, warn
from darts_server.exceptions import InvalidSetting
from darts_server.http.security.access import Access, check_listening
from darts_server.settings import Settings


def before_the_start(settings: Settings, args: Namespace) -> Iterator[Finding]:
    """Those that take no time, and ask nobody."""
    yield from machine.checks(None if args.uds else args.host, args.port)
    yield folders.state(settings.state_dir)
    from darts_server.vllm import checks

    yield from folders.weights(settings.weights_root, settings.weights_staging, checks.model_bytes(args))
    yield probe(settings, checks.probe_fault(args))


def of_vllm(args: Namespace, named: bool) -> Iterator[Finding]:
    """Of vLLM and the model; ``named``: whether there is one to look for."""
    from darts_server.vllm import checks

    version, doubt = checks.version()
    yield ok("vLLM", version) if doubt is None else warn("vLLM", doubt)
    devices, fault = checks.devices()
    yield ok("devices", devices) if fault is None else fail("devices", f"{devices}: {fault}")
    if not named:
        yield warn("model", "none was named; name one to have it looked for")
        return
    model, fault = checks.model(args)
    yield ok("model", model) if fault is None else fail("model", f"{model}: {fault}")


def address(args: Namespace, access: Access, allowed: bool) -> Finding:
    """Who may come. ``allowed``: everyone, even without a key."""
    if args.uds:
        return ok("address", f"the socket {args.uds}, for this machine alone")
    try:
        check_listening(args.host, access, allowed)
    except InvalidSetting as error:
        return fail("address", str(error))
    keys = "with keys" if access.keys else "without API keys"
    if allowed and not access.keys:
        return warn("address", f"{args.host}, {keys}, as --allow-unauthenticated says: whoever reaches it may use it")
    return ok("address", f"{args.host}, {keys}, {'with' if access.admin_keys else 'without'} admin keys")


def probe(settings: Settings, fault: str | None) -> Finding:
    """Whether hidden states can be told, as far as can be seen without an engine."""
    wanted = "arrol" in settings.policy and "head" in settings.quality
    if fault is None:
        return ok("probe", "nothing is in its way" if wanted else "not needed by the default policy")
    if not wanted:
        return ok("probe", f"not possible ({fault}), and not needed")
    if settings.quality_fallback == "refuse":
        return fail("probe", f"--policy {settings.policy} needs hidden states, and {fault}; score by --quality logprob")
    return warn("probe", f"--policy {settings.policy} goes by log-probs instead of hidden states: {fault}")
