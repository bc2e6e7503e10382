"""The calculator as a tool server of verifiers, which runs this module as a process."""

import verifiers.v1 as vf

from tests.trainers.harnesses.group import calculate


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def calculator(self, text: str) -> str:
        """Calculate."""
        return calculate(text)


if __name__ == "__main__":
    Calculator.run()
