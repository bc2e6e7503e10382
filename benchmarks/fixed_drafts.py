"""Our drafter with as many drafted tokens as are allowed in every step, as a control for draft lengths that adapt."""

from vllm.config import VllmConfig

from darts_server.drafts.lengths import Savings, StepTimes
from darts_server.vllm.engine_core.drafter import Drafter


class FreeTokens(StepTimes):
    """Step times under which drafts cost nothing, so that all drafts are worth it."""

    def __init__(self) -> None:
        super().__init__()
        self.draft_cost_share = 0.0

    def observe_plain(self, sequences: int, seconds: float) -> None:
        """Learn nothing."""

    def observe_drafted(self, sequences: int, drafted: int, seconds: float) -> float:
        """Learn nothing."""
        return seconds


class NoAccount(Savings):
    def may_draft(self, sequences: int) -> bool:
        return True


class FixedDrafter(Drafter):
    """Drafts ``num_speculative_tokens`` tokens wherever there is a draft."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.drafts.times = FreeTokens()
        self.drafts.savings = NoAccount()
