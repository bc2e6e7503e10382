"""A worker extension of a user."""


class UserExtension:
    """Mixed into vLLM's worker."""

    def user_method(self) -> str:
        return "here"
