"""A worker extension as a user may have one."""


class Users:
    """Mixed into vLLM's worker."""

    def users_own(self) -> str:
        return "here"
