"""An agent with a calculator: multi-turn GRPO on a tiny policy, plain and with session groups."""
