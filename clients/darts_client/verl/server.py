"""The actor of one replica: starts its darts-server, sends veRL's requests to it, and controls it."""

import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_visible_devices_keyword
from verl.utils.net_utils import get_free_port, is_valid_ipv6_address
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import TokenOutput

from .._errors import DartsError
from .._requests import STARTING_ERRORS as LOST_ERRORS
from ..integrations._sampling import Sampler
from .process import start_guarded
from .weights import weights_root

logger = logging.getLogger(__name__)

STARTUP_SECONDS = 1800.0
"""Loading a large model from a network disk takes many minutes."""
EXIT_SECONDS = 10.0
"""For a process to be seen to have ended, after its connections broke."""
DRAIN_SECONDS = 5.0
"""Timeout of the answers of aborted requests. The server sends them at once."""
POLL_SECONDS = 0.1
MAX_RESTARTS = 3
"""A server that ends more often has a reason that a restart does not remove."""
MEMORY_PARTS = frozenset({"weights", "kv_cache"})
"""vLLM's names of the parts that sleep."""


class DartsServer:
    """A darts-server process. veRL calls the methods without an underscore.

    Args:
        config: veRL's `RolloutConfig`.
        model_config: veRL's `HFModelConfig`.
        devices: visible devices, separated by commas.
    """

    def __init__(
        self,
        config: Any,
        model_config: Any,
        replica_rank: int,
        devices: str,
    ) -> None:
        self.config = omega_conf_to_dataclass(config)
        self.model_config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        """Training step of the served weights."""
        memory_is_shared = self.config.enable_sleep_mode and self.config.free_cache_engine
        self._may_sleep = memory_is_shared and get_device_name() != "cpu"
        self._folder = weights_root(self.config)

        self._host = ray.util.get_node_ip_address().strip("[]")
        self._port, _ = get_free_port(self._host)
        admin_key = secrets.token_hex(32)
        self._sampler = Sampler(f"http://{self.get_address()}", api_key=admin_key)
        # Only this actor calls the server, unless the user has set a key for others.
        self._env = {"VLLM_API_KEY": secrets.token_hex(32)} | os.environ
        self._env |= {"DARTS_ADMIN_API_KEY": admin_key, "VLLM_SERVER_DEV_MODE": "1"}
        self._env[get_visible_devices_keyword()] = devices

        self._process: Any = None
        self._restart_lock = asyncio.Lock()
        self._num_restarts = 0
        self._weights: tuple[str, int] | None = None
        """Folder and step of the last weights."""
        self._max_model_len = 0
        # A pause by veRL, and the parts of the memory that sleep. New requests wait for the end of both.
        self._is_paused = False
        self._sleeping_parts: frozenset[str] = frozenset()
        self._rejects_requests = False
        self._pause_changed = asyncio.Event()
        self._steps_in_flight: dict[object, int | None] = {}
        """Step of the weights that sample the first token of each request in flight."""

    def get_address(self) -> str:
        host = f"[{self._host}]" if is_valid_ipv6_address(self._host) else self._host
        return f"{host}:{self._port}"

    # --- the process ------------------------------------------------------------

    async def launch_server(self) -> None:
        """Start the server, and wait until it is healthy.

        Raises:
            RuntimeError: it ended.
            TimeoutError: it is not healthy in time.
        """
        command = [sys.executable, "-m", "darts_server", "serve", self.model_config.local_path]
        command += ["--host", self._host, "--port", str(self._port), "--weights-root", str(self._folder)]
        command += server_flags(self.config, self.model_config, self.replica_rank, self._folder)
        if self._may_sleep:
            command.append("--enable-sleep-mode")
        self._process = await start_guarded(self._folder, command, self._env)

        exit_code = asyncio.ensure_future(self._process.wait())
        async with asyncio.timeout(STARTUP_SECONDS):
            while not exit_code.done():
                try:
                    models = await self._sampler.request("GET", "/v1/models")
                    self._max_model_len = models.json()["data"][0]["max_model_len"]
                    return
                except DartsError:
                    await asyncio.wait({exit_code}, timeout=POLL_SECONDS)
        raise RuntimeError(
            f"darts-server ended with code {exit_code.result()} while it started; its output is in the log of this "
            "actor. Its flags come from actor_rollout_ref.rollout and engine_kwargs.darts"
        )

    async def _restart(self, lost_process: Any, error: DartsError) -> None:
        """Start the server again with the last weights. Raise the error if the process has not ended."""
        async with self._restart_lock:
            if self._process is not lost_process:
                # Another request has restarted it.
                return
            try:
                await asyncio.wait_for(lost_process.wait(), EXIT_SECONDS)
            except TimeoutError:
                raise error from None
            if self._num_restarts == MAX_RESTARTS:
                raise RuntimeError(f"darts-server of replica {self.replica_rank} ended {MAX_RESTARTS + 1} times")
            self._num_restarts += 1
            logger.warning("darts-server of replica %d ended, and is started again", self.replica_rank)
            await self.launch_server()
            if self._weights is not None:
                await self._send_weights(*self._weights)
            # The new process is not paused.
            if self._is_paused:
                await self._sampler.request("POST", "/pause?mode=abort", json={})

    async def _call_with_restart(self, call: Any, *arguments: Any, **options: Any) -> Any:
        while True:
            process = self._process
            try:
                return await call(*arguments, **options)
            except LOST_ERRORS as error:
                # Raises the error unless the process has ended.
                await self._restart(process, error)

    async def _post(self, path: str) -> None:
        await self._call_with_restart(
            self._sampler.request,
            "POST",
            path,
            json={},
        )

    # --- requests ---------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        client_resumes: bool = True,
        **media: Any,
    ) -> Any:
        """Sample one turn of a trajectory.

        A client that resumes aborted answers gets them as they are.

        Raises:
            ValueError: an argument is not served, or the prompt leaves no room for a token.
            DartsError: the request failed.
        """
        unserved = [name for name, value in media.items() if value]
        if unserved:
            raise ValueError(f"{', '.join(unserved)}: rollout.name=darts serves prompts of token ids only")
        prompt = normalize_token_ids(prompt_ids)
        sampling = dict(sampling_params)
        with_logprobs = bool(sampling.pop("logprobs", False))
        max_tokens = self._pop_max_tokens(sampling, len(prompt))
        sampling.setdefault("repetition_penalty", self.config.repetition_penalty)
        sampling.setdefault("ignore_eos", self.config.ignore_eos)
        if self.config.full_determinism:
            sampling.setdefault("seed", self.replica_rank + self.config.seed)

        tokens: list[int] = []
        logprobs: list[float] = []
        first_step: int | None = None
        stop_reason = "aborted"
        while stop_reason == "aborted" and await self._wait_until_admitted():
            sampling["max_tokens"] = max_tokens - len(tokens)
            request_key = object()
            self._steps_in_flight[request_key] = self.global_steps
            try:
                answer = await self._call_with_restart(
                    self._sampler.sample,
                    [*prompt, *tokens],
                    sampling,
                    logprobs=with_logprobs,
                    headers=headers,
                )
            finally:
                # An update during a pause has changed the step of requests that had not begun.
                step = self._steps_in_flight.pop(request_key)
            if not tokens and answer.token_ids:
                first_step = step
            tokens += answer.token_ids
            logprobs += answer.token_logprobs
            # An answer that was aborted after its last token is complete.
            if answer.finish_reason != "abort" or len(tokens) == max_tokens:
                stop_reason = "completed"
            # For other clients, the loop continues the answer after the pause.
            elif client_resumes:
                break

        # An answer without tokens has no step, so that a client that resumes takes the first step from the next answer.
        last_step = self.global_steps if tokens else None
        return TokenOutput(
            token_ids=tokens,
            log_probs=logprobs if with_logprobs else None,
            stop_reason=stop_reason,
            extra_fields={"global_steps": last_step, "min_global_steps": first_step, "max_global_steps": last_step},
        )

    def _pop_max_tokens(self, sampling: dict[str, Any], prompt_tokens: int) -> int:
        model_limit = self._max_model_len - prompt_tokens
        if model_limit < 1:
            raise ValueError(
                f"a prompt of {prompt_tokens} tokens leaves no room in max_model_len {self._max_model_len}"
            )
        # veRL uses either name.
        max_new_tokens = sampling.pop("max_new_tokens", None)
        max_tokens = sampling.pop("max_tokens", max_new_tokens)
        if max_tokens is None:
            # The prompt of a later turn contains earlier answers, so it may be longer than `prompt_length`.
            unused_length = self.config.prompt_length + self.config.response_length - prompt_tokens
            max_tokens = min(self.config.response_length, unused_length)
        return int(max(1, min(max_tokens, model_limit)))

    async def _wait_until_admitted(self) -> bool:
        """Wait while generation is paused. Return False if requests are rejected."""
        while self._is_paused or self._sleeping_parts:
            if self._rejects_requests:
                return False
            self._pause_changed.clear()
            await self._pause_changed.wait()
        return True

    # --- weights and pauses -----------------------------------------------------

    async def load_weights(self, path: str, global_steps: int | None) -> None:
        """Serve the weights in a folder, as the weights of a training step (None: the same step as before)."""
        if global_steps is None:
            global_steps = self.global_steps or 0
        await self._call_with_restart(self._send_weights, path, global_steps)
        self._weights = (path, global_steps)
        self.global_steps = global_steps
        # Requests that reached the server during the pause begin with these weights.
        if self._is_paused:
            self._steps_in_flight = dict.fromkeys(self._steps_in_flight, global_steps)

    async def _send_weights(self, path: str, global_steps: int) -> None:
        # veRL aborts requests before an update if they should not continue. A restart sends the same version again.
        body = {"path": path, "version": global_steps, "rule": "keep", "repeat_version": True}
        await self._sampler.request("POST", "/darts/v1/weights", json=body)

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests with their tokens so far, and pause until `resume_generation`.

        Args:
            reject_request: whether later requests are answered as aborted, instead of waiting.
        """
        self._is_paused = True
        self._rejects_requests = reject_request
        self._pause_changed.set()
        await self._post("/pause?mode=abort")
        # Tokens of an answer that arrives after the next update would be counted to the new weights.
        deadline = asyncio.get_running_loop().time() + DRAIN_SECONDS
        while self._steps_in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS / 10)

    async def resume_generation(self) -> None:
        if self._is_paused:
            await self._post("/resume")
        self._is_paused = False
        self._rejects_requests = False
        self._pause_changed.set()

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache. Requests that still run continue after `wake_up`."""
        if self._may_sleep:
            self._sleeping_parts = MEMORY_PARTS
            # Level 2 discards the weights. The next update brings them.
            await self._post("/sleep?level=2&mode=abort")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        parts_to_wake = self._sleeping_parts & frozenset(tags or MEMORY_PARTS)
        if parts_to_wake:
            await self._post("/wake_up?" + "&".join(f"tags={part}" for part in sorted(parts_to_wake)))
            self._sleeping_parts -= parts_to_wake
            self._pause_changed.set()

    async def release_kv_cache(self) -> None:
        await self.sleep()
        await self.wake_up(["weights"])

    async def resume_kv_cache(self) -> None:
        await self.wake_up(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Do nothing. The server clears its caches at each update of the weights."""

    async def start_profile(self, **_: Any) -> None:
        raise NotImplementedError(
            "rollout.name=darts has no profiler; set actor_rollout_ref.rollout.profiler.enable=False"
        )


FORWARDED_SETTINGS = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "logprobs_mode",
    "scheduling_policy",
)
"""veRL's rollout settings that are flags of vLLM with the same name."""


def server_flags(
    config: Any,
    model_config: Any,
    replica_rank: int,
    folder: Path,
) -> list[str]:
    """Return the flags of a rollout configuration. `engine_kwargs.darts` goes before veRL's own settings."""
    settings: dict[str, Any] = {name: getattr(config, name) for name in FORWARDED_SETTINGS}
    settings["seed"] = replica_rank + config.seed
    settings["trust_remote_code"] = model_config.trust_remote_code
    settings["state_dir"] = folder / "state"
    user_settings = config.engine_kwargs.get("darts") or {}
    if OmegaConf.is_config(user_settings):
        user_settings = OmegaConf.to_container(user_settings, resolve=True)
    settings |= {name.replace("-", "_"): value for name, value in user_settings.items()}
    # It is the parent of the job's folder, see `weights.weights_root`.
    settings.pop("weights_root", None)
    if settings["state_dir"] is not None:
        # Two servers must not share learned state.
        settings["state_dir"] = Path(settings["state_dir"]) / f"replica-{replica_rank}"
    return to_flags(settings)


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return command-line flags. True is a bare flag, False its `--no-` form, and None is left out."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is True:
            flags.append(f"--{flag}")
        elif value is False:
            flags.append(f"--no-{flag}")
        elif isinstance(value, dict):
            flags += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return flags
