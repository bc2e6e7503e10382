"""Policies and controls on the sessions of a trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

import numpy as np

from darts_server.exceptions import InvalidSetting
from darts_server.group.group import selection_weights
from darts_server.offline.simulation.baselines import LOST_SHARES
from darts_server.offline.simulation.model.batch import BatchPlan, Floats
from darts_server.offline.simulation.model.engines import TOLERANCE, Machine
from darts_server.offline.simulation.model.sessions import Session, SessionGroup, SessionRollout, SessionRun
from darts_server.offline.simulation.policies import Policy, parse_policy
from darts_server.offline.simulation.summary import Summary, relative_to
from darts_server.offline.simulation.training import WARM_UP
from darts_server.policy.deadline import RecentCompletionLengths
from darts_server.types import OFF

FIRST = "first"
"""Returns the first sessions that finish, as Polar does. It has the redundancy of `uniform`."""
SESSION_POLICIES = (FIRST, "uniform", "cap", "off,start=1.5", "off,start=1.5,carry=resume")
"""Policies that are compared with `off` by default."""
COUNTS = (
    "tokens_generated",
    "tokens_recomputed",
    "turns",
    "turns_saved",
    "tool_seconds",
    "tool_seconds_saved",
)
SESSION_COLUMNS = {
    "policy": ("policy", ""),
    "rollout_seconds": ("rollout s", ".1f"),
    "rollout_speedup": ("rollout x", ".2f"),
    "rollout_error": ("±", ".2f"),
    "step_speedup": ("step x", ".2f"),
    "step_error": ("±", ".2f"),
    "tokens_generated": ("generated", ".2f"),
    "tokens_recomputed": ("recomputed", ".2f"),
    "turns": ("turns", ".0f"),
    "turns_saved": ("saved", ".0f"),
    "tool_seconds": ("tools s", ".0f"),
    "tool_seconds_saved": ("saved s", ".1f"),
    "length": ("length", "+.1%"),
    "length_z": ("z", ".1f"),
    "turns_bias": ("turns", "+.1%"),
    "turns_z": ("z", ".1f"),
    "cut_share": ("cut", ".1%"),
    "lost_share": ("lost", ".1%"),
    "stale_share": ("stale", ".0%"),
}
SESSION_LEGEND = """\
rollout x, step x  times as fast as off, with the standard error over the steps; a step is a rollout and its training
generated          tokens, divided by the tokens that off generates
recomputed         tokens that were computed again after an eviction, a preemption or new weights, divided by the same
turns, tools s     turns that have begun, and seconds in tools, in a step
saved              turns, and seconds in tools, that stopped sessions of returned groups would have taken
length, turns      weighted mean of the returned sessions, compared with the mean of all sessions of the step's new
                   prompts, both as they would be if nothing stopped or cut them; z is the difference over its error
cut, lost          shares of the returned sessions that are cut, and of their tokens that are lost by that
stale              share of the returned tokens that older weights generated
first              for comparison: the first sessions that finish, all with weight 1
start=1.5          tail batching: 1.5 N prompts are started for a step of N, and the first N complete groups are
                   returned. The sessions of the other groups start again in the next step, or with carry=resume go on
hindsight          the smallest limit of an agent's turns or generated tokens that cuts at most such a share of the
                   sessions: 2 %, 10 %, and the share that each policy cuts
Prompts are in a new random order each time that all have run, and so are the samples of each prompt. Sessions beyond a
prompt's samples in the trace are drawn from these samples with replacement."""


@dataclass(frozen=True, slots=True)
class SessionTraining:
    workload: Sequence[Sequence[Session]]
    """Samples of each prompt of the trace."""
    machine: Machine
    size: int
    """Group size."""
    prompts: int
    """Prompts of a step."""
    steps: int
    by_seconds: bool = False
    """See `SessionRollout`."""
    seed: int = 0

    def draw(self, number: int, attempt: int, count: int) -> tuple[list[Session], np.random.Generator]:
        """Return the sessions of a prompt, which are the same under every policy, and a generator of tail draws."""
        epoch, place = divmod(number, len(self.workload))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.workload))
        samples = self.workload[order[place]]
        rng = np.random.default_rng([self.seed, number, attempt])
        own = rng.permutation(len(samples))[:count]
        # If the trace has too few samples, draw the others with replacement.
        repeated = rng.integers(len(samples), size=count - own.size)
        return [samples[index] for index in (*own, *repeated)], rng


def compare_with_limits(policies: Sequence[str], training: SessionTraining) -> list[Summary]:
    """Return the figures of `off`, the policies, and fixed limits of turns or tokens, compared with `off`."""
    summaries = [run_sessions(policy, training) for policy in dict.fromkeys([OFF, *policies])]
    # For each share that a policy cuts, compare the limit that cuts as much. A limit that cuts nothing is no limit.
    shares = {*LOST_SHARES, *(summary["cut_share"] for summary in summaries)} - {0.0}
    for limit in best_limits(training.workload, sorted(shares)):
        name = "hindsight " + " ".join(f"{unit} {maximum}" for unit, maximum in limit.items())
        summaries.append(run_sessions(OFF, training, limit) | {"policy": name})
    return [_compare(summaries[0], summary) for summary in summaries]


def best_limits(workload: Sequence[Sequence[Session]], shares: Sequence[float]) -> list[dict[str, int]]:
    """Return the smallest limits that cut at most these shares of sessions."""
    sessions = [session for samples in workload for session in samples]
    lengths_by_unit = {
        "turns": [len(session.turns) for session in sessions],
        "tokens": [session.tokens for session in sessions],
    }
    limits: list[dict[str, int]] = []
    for unit, lengths in lengths_by_unit.items():
        for share in shares:
            # If each limit of turns cuts more, take the largest limit that cuts a session.
            limit = min(int(np.quantile(lengths, 1 - share, method="inverted_cdf")), max(lengths) - 1)
            if limit and {unit: limit} not in limits:
                limits.append({unit: limit})
    return limits


def limit_session(session: Session, turns: int | None = None, tokens: float = inf) -> Session:
    kept_turns = []
    tokens_left = tokens
    for turn in session.turns[:turns]:
        kept_turns.append(turn._replace(generated=int(min(turn.generated, tokens_left))))
        tokens_left -= turn.generated
        if tokens_left <= 0:
            break
    # A session that ends at this limit counts as finished, if it finished in the trace.
    return Session(tuple(kept_turns), session.valid)


def run_sessions(text: str, training: SessionTraining, limit: Mapping[str, int] | None = None) -> Summary:
    """Simulate a training run, and return its figures.

    ``text``: a policy with its options. ``limit``: arguments of `limit_session`.

    Raises:
        InvalidSetting: the name or an option is unknown or not for sessions, or a value is invalid.
    """
    is_first = text.partition(",")[0] == FIRST
    policy_text = text
    if is_first:
        # The shortest sessions by the clock are the first that finish.
        policy_text = text.replace(FIRST, "uniform,longest=0", 1)
    policy = parse_policy(policy_text, training.size)
    # Sessions have the options of the selection, start, and for `off` carry=resume.
    resumes = policy.resumes and policy.shaping is None
    supported = Policy(policy.name, policy.shaping, policy.start, resumes)
    if policy != supported:
        raise InvalidSetting(f"--policies: {text} is not for sessions; --join-turns simulates a sample as one answer")
    num_started = round(policy.start * training.prompts)
    warm_up = WARM_UP if num_started > training.prompts else 0
    # The lengths of a prompt's earlier groups are not known.
    plan = BatchPlan.of(
        policy.shaping,
        training.size,
        [None] * num_started,
        needed_groups=training.prompts,
    )
    recent = RecentCompletionLengths()
    figures = _Figures()
    # Without a warm-up its prompts are skipped, so that all policies measure about the same prompts.
    next_number = (WARM_UP - warm_up) * training.prompts
    # Left-over prompts with the number of their attempt, and their groups if they resume.
    left_over: list[tuple[int, int]] = []
    carried: list[SessionGroup] = []
    # Sessions of each prompt, as they would be if nothing stopped or cut them.
    drawn: dict[int, list[Session]] = {}
    for step in range(-warm_up, training.steps):
        # Forget the warm-up.
        if step == 0:
            figures = _Figures()
        new_numbers = range(next_number, next_number + num_started - len(left_over))
        next_number = new_numbers.stop
        prompts = [*left_over, *((number, 1) for number in new_numbers)]
        sessions = []
        rngs = []
        for row in range(len(carried), num_started):
            number, attempt = prompts[row]
            drawn[number], rng = training.draw(number, attempt, plan.candidates[row])
            rngs.append(rng)
            group = [limit_session(session, **(limit or {})) for session in drawn[number]]
            # Under `first`, sessions that end at a limit have finished, too.
            sessions.append([session._replace(valid=session.valid or is_first) for session in group])
        for number in new_numbers:
            figures.means[number] = _tokens_and_turns(drawn[number]).mean(axis=0)

        tokens_before = {run: run.tokens for member in carried for run in member.runs}
        by_seconds = training.by_seconds or is_first
        rollout = SessionRollout(sessions, rngs, plan.with_recent(recent), training.machine, by_seconds, carried)
        rollout.run()
        for length in rollout.completion_lengths:
            recent.add(length)

        returned_rows = rollout.completed[: training.prompts]
        trained_tokens = 0
        for row in sorted(returned_rows):
            number = prompts[row][0]
            trained_tokens += figures.add_returned(rollout.groups[row], number, drawn[number], tokens_before)
        figures.rollouts.append(rollout.seconds)
        figures.steps.append(rollout.seconds + training.machine.training_seconds(trained_tokens))

        left_over_rows = [row for row in range(num_started) if row not in returned_rows]
        left_over = []
        carried = []
        for row in left_over_rows:
            number, attempt = prompts[row]
            rollout.remove(rollout.groups[row], resumes)
            if resumes:
                left_over.append((number, attempt))
                carried.append(rollout.groups[row])
            else:
                left_over.append((number, attempt + 1))
                figures.add_stopped(rollout.groups[row])
    return figures.summarise(text)


def _tokens_and_turns(sessions: Sequence[Session]) -> Floats:
    """Shape (S, 2)."""
    return np.asarray([[session.tokens, len(session.turns)] for session in sessions], dtype=np.float64)


class _Figures:
    def __init__(self) -> None:
        self.rollouts: list[float] = []
        self.steps: list[float] = []
        self.means: dict[int, Floats] = {}
        """Mean tokens and turns of the sessions of each new prompt."""
        self._weighted_means: dict[int, Floats] = {}
        """Weighted mean tokens and turns of the returned sessions of each prompt."""
        self._counts: list[tuple[float, ...]] = []
        """`COUNTS` of each session that has ended."""
        self._returned: list[tuple[bool, int, int, int]] = []
        """Whether each returned session is cut, its tokens without the cut and with it, and those of older weights."""

    def add_stopped(self, member: SessionGroup) -> None:
        """Count a group that starts again in the next step."""
        self._counts += [(run.tokens, run.recomputed, run.turns, 0, run.tool_seconds, 0) for run in member.runs]

    def add_returned(
        self,
        member: SessionGroup,
        number: int,
        whole_sessions: Sequence[Session],
        tokens_before: Mapping[SessionRun, int],
    ) -> int:
        """Count a returned group, and return the tokens that training reads. ``tokens_before``: of older weights."""
        for run, session in zip(member.runs, whole_sessions, strict=True):
            seconds_saved = sum(turn.tool_seconds for turn in session.turns) - run.tool_seconds
            turns_saved = len(session.turns) - run.turns
            self._counts.append((run.tokens, run.recomputed, run.turns, turns_saved, run.tool_seconds, seconds_saved))
        trained_tokens = 0
        selected = [candidate for candidate in member.group.candidates if candidate.selected_as is not None]
        for candidate in selected:
            run = member.runs[candidate.index]
            # The engine may have run a cut session a little further.
            tokens_beyond_cut = max(0, run.tokens - candidate.tokens)
            whole_tokens = whole_sessions[candidate.index].tokens
            kept_tokens = run.tokens - tokens_beyond_cut
            is_cut = candidate.cut or kept_tokens < whole_tokens
            self._returned.append((is_cut, whole_tokens, kept_tokens, tokens_before.get(run, 0)))
            # Training reads prompts and what tools have added, too.
            trained_tokens += run.context - tokens_beyond_cut
        weight_of_index = selection_weights(member.group)
        weights = [weight_of_index.get(candidate.index, 1.0) for candidate in selected]
        lengths = _tokens_and_turns([whole_sessions[candidate.index] for candidate in selected])
        self._weighted_means[number] = np.average(lengths, axis=0, weights=weights)
        return trained_tokens

    def summarise(self, name: str) -> Summary:
        expected = np.mean([*self.means.values()], axis=0)
        found = np.mean([*self._weighted_means.values()], axis=0)
        # The standard error of the difference, from the contribution of each prompt to it. A prompt may be new in one
        # step, and returned in a later step or never.
        contributions = []
        for number in {**self.means, **self._weighted_means}:
            of_returned = (self._weighted_means.get(number, found) - found) / len(self._weighted_means)
            of_new = (self.means.get(number, expected) - expected) / len(self.means)
            contributions.append(of_returned - of_new)
        count = len(contributions)
        errors = np.sqrt(np.square(contributions).sum(axis=0) * count / max(count - 1, 1))
        z = np.divide(found - expected, errors, out=np.zeros(2), where=errors > TOLERANCE)
        bias = (found / expected - 1).tolist()

        num_cut, whole_tokens, kept_tokens, stale_tokens = np.sum(self._returned, axis=0).tolist()
        counts = (np.sum(self._counts, axis=0) / len(self.steps)).tolist()
        summary: Summary = dict(zip(COUNTS, counts, strict=True))
        return summary | {
            "policy": name,
            "rollouts": self.rollouts,
            "steps": self.steps,
            "rollout_seconds": fmean(self.rollouts),
            "step_seconds": fmean(self.steps),
            "length": bias[0],
            "length_z": float(z[0]),
            "turns_bias": bias[1],
            "turns_z": float(z[1]),
            "cut_share": num_cut / len(self._returned),
            "lost_share": 1 - kept_tokens / whole_tokens,
            "stale_share": stale_tokens / kept_tokens,
        }


def _compare(off: Summary, summary: Summary) -> Summary:
    """Return the figures compared with ``off``, and standard errors of the speedups."""
    compared = relative_to(off, summary)
    for name in ("rollout", "step"):
        seconds = np.asarray(summary[f"{name}s"])
        # The error of a ratio of means, by the residuals of each step.
        differences = np.asarray(off[f"{name}s"]) - compared[f"{name}_speedup"] * seconds
        error = None
        if seconds.size > 1:
            error = float(differences.std(ddof=1) / np.sqrt(seconds.size) / seconds.mean())
        compared[f"{name}_error"] = error
    return compared
