"""A callback of transformers' Trainer that saves the server's state with checkpoints and logs the server's metrics."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._errors import DartsError
from .._prompts import drop_none
from ._server import Server

STATE_FILE = "darts-state"
"""File name in a checkpoint's folder."""

COUNTERS = {
    "darts/candidates_started": "darts_candidates_started_total",
    "darts/candidates_cut": "darts_candidates_cut_total",
    "darts/tokens_generated": 'darts_tokens_total kind="generated"',
    "darts/tokens_returned": 'darts_tokens_total kind="returned"',
    "darts/rewards_matched": 'darts_rewards_total matched="true"',
    "darts/rewards_unmatched": 'darts_rewards_total matched="false"',
}
"""Metrics that are logged as the increase since the last log. A value may name a label that samples must have."""

GAUGES = {"darts/weight_version": "darts_weight_version", "darts/pass_rate": "darts_pass_rate"}
"""Metrics that are logged as they are."""

logger = logging.getLogger(__name__)


class DartsCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]  # Any without trl
    """Saves and restores the server's state with checkpoints, and adds its metrics to the logs of training steps.

    `DartsGRPOTrainer` has one. For another trainer, put it before the reporters, so that they see the metrics:

    ```python
    trainer.callback_handler.callbacks.insert(0, DartsCallback("http://127.0.0.1:8000"))
    ```

    If the server is unavailable, one warning is logged and training continues.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.checkpoint: Path | None = None
        """Folder from which training resumes, if it is not in `output_dir`."""
        self._server = Server(url, api_key)
        self._counts: dict[str, float] = {}
        self._has_warned = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero:
            return
        if state.global_step:
            self._restore((self.checkpoint or _checkpoint_folder(args, state)) / STATE_FILE)
        # The first log has the increase since this call.
        self._attempt("read the server's metrics", self._read_metrics)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero:
            path = _checkpoint_folder(args, state) / STATE_FILE
            self._attempt("save the server's state", lambda: self._save(path))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Logs of an evaluation have "eval_loss", and logs at the end of training "train_loss".
        if state.is_world_process_zero and logs is not None and "loss" in logs:
            metrics = self._attempt("read the server's metrics", self._read_metrics) or {}
            logs.update(metrics)
            # transformers has already copied the logs into the history.
            state.log_history[-1].update(metrics)

    def _save(self, path: Path) -> None:
        with self._server.client() as client:
            client.state.save(path)

    def _restore(self, path: Path) -> None:
        if not path.is_file():
            logger.warning("%s does not exist: the server keeps its present state", path)
            return
        with self._server.client() as client:
            prompts = self._attempt("restore the server's state", lambda: client.state.load(path))
        if prompts is not None:
            logger.info("restored the server's statistics of %d prompts from %s", prompts, path)

    def _read_metrics(self) -> dict[str, float]:
        """Return the increase of `COUNTERS` since the last call, and `GAUGES`."""
        with self._server.client() as client:
            text = client.metrics()
        counts = _read_samples(text, COUNTERS)
        increases = {}
        for name, count in counts.items():
            previous = self._counts.get(name, 0.0)
            # A counter that decreased belongs to a restarted server, which counts from 0.
            if count < previous:
                previous = 0.0
            increases[name] = count - previous
        self._counts = counts
        return increases | _read_samples(text, GAUGES)

    def _attempt(self, purpose: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (DartsError, OSError) as error:
            if not self._has_warned:
                logger.warning("could not %s; further failures are not logged: %s", purpose, error)
            self._has_warned = True
            return None


def sum_samples(text: str, name_and_label: str) -> float | None:
    """Return the sum of a metric's samples in Prometheus' text format, or None without samples.

    >>> sum_samples('a_total{kind="x"} 1.0\\na_total{kind="y"} 2.0', 'a_total kind="y"')
    2.0
    """
    name, _, label = name_and_label.partition(" ")
    values = []
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")) and label in line:
            values.append(float(line.rsplit(" ", 1)[1]))
    return sum(values) if values else None


def _read_samples(text: str, metrics: Mapping[str, str]) -> dict[str, float]:
    return drop_none({name: sum_samples(text, metric) for name, metric in metrics.items()})


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
