"""What the server has learned, kept with a Trainer's checkpoints, and its metrics in the Trainer's logs."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._errors import DartsError
from ._link import Link

STATE = "darts-state"
"""The file in a checkpoint's folder."""

COUNTED = {
    "darts/candidates_started": "darts_candidates_started_total",
    "darts/candidates_cut": "darts_candidates_cut_total",
    "darts/tokens_generated": 'darts_tokens_total kind="generated"',
    "darts/tokens_returned": 'darts_tokens_total kind="returned"',
    "darts/rewards_matched": 'darts_rewards_total matched="true"',
    "darts/rewards_unmatched": 'darts_rewards_total matched="false"',
}
"""Logged as what came since the last log. Values: the metric's name, and a label that it must carry."""

GAUGED = {"darts/weight_version": "darts_weight_version", "darts/pass_rate": "darts_pass_rate"}
"""Logged as they are."""

logger = logging.getLogger(__name__)


class DartsCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves and restores the server's state with checkpoints, and adds its metrics to the logs of training steps.

    `DartsGRPOTrainer` has one. Another trainer can have it too; give it `url` then, and put it before the reporters
    (`trainer.callback_handler.callbacks.insert(0, callback)`) if they are to have the metrics.

    A server that is away is warned of once, and training goes on. `checkpoint`: the folder that training is resumed
    from, if that is not `output_dir`'s.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.checkpoint: Path | None = None
        self._link = Link(url, api_key)
        self._counts: dict[str, float] = {}
        self._warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if state.global_step:
            self._restore((self.checkpoint or _folder(args, state)) / STATE)
        self._attempt("read the server's metrics", self._news)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._attempt("save the server's state", lambda: self._save(_folder(args, state) / STATE))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Evaluation has "eval_loss", the end of training "train_loss".
        if state.is_world_process_zero and logs is not None and "loss" in logs:
            news = self._attempt("read the server's metrics", self._news) or {}
            logs.update(news)
            state.log_history[-1].update(news)  # a copy of the logs, made before

    def _save(self, path: Path) -> None:
        with self._link.aside() as client:
            client.state.save(path)

    def _restore(self, path: Path) -> None:
        if not path.is_file():
            logger.warning("%s is not there: the server goes on with what it knows", path)
            return
        with self._link.aside() as client:
            prompts = self._attempt("restore the server's state", lambda: client.state.load(path))
        if prompts is not None:
            logger.info("the server knows %d prompts again, from %s", prompts, path)

    def _news(self) -> dict[str, float]:
        text = self._link.metrics()
        counts = {name: value for name, metric in COUNTED.items() if (value := total(text, metric)) is not None}
        # A counter below what it was is of a server that was restarted.
        since = {
            name: value - was if value >= (was := self._counts.get(name, 0.0)) else value
            for name, value in counts.items()
        }
        self._counts = counts
        return since | {name: value for name, metric in GAUGED.items() if (value := total(text, metric)) is not None}

    def _attempt(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (DartsError, OSError) as error:
            if not self._warned:
                logger.warning("could not %s, and may not again without a further word: %s", what, error)
            self._warned = True
            return None


def total(text: str, metric: str) -> float | None:
    """Sum of a metric's samples in Prometheus' text format; None if there are none.

    >>> total('a_total{kind="x"} 1.0\\na_total{kind="y"} 2.0', 'a_total kind="y"')
    2.0
    """
    name, _, label = metric.partition(" ")
    lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")) and label in line)
    values = [float(line.rsplit(" ", 1)[1]) for line in lines]
    return sum(values) if values else None


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
