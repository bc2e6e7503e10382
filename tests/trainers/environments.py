"""Virtual environments with the trainers, one for each, below `.venv-trainers`.

    python -m tests.trainers.environments            # all
    python -m tests.trainers.environments areal art  # these

Each sees the packages of `.venv` behind its own. Trainers are installed without what they require, of which only the
part for their own client code follows: the whole needs GPUs and gigabytes.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-trainers"
SECONDS = 900
"""For one environment to be installed."""


@dataclass(frozen=True)
class Environment:
    """``module``: what must be importable. ``packages``: pip's requirements, the trainer first.

    ``python``: a command, for a trainer that needs a later Python than `.venv` has. Such an environment does not see
    the packages of `.venv`, and those that follow the trainer bring what they require. ``at_start``: a line that each
    Python of the environment runs first.
    """

    module: str
    packages: str
    python: str | None = None
    at_start: str = ""

    @property
    def package(self) -> str:
        """The trainer's distribution, without its version."""
        return self.packages.split("==")[0]


HYDRA = "hydra-core omegaconf antlr4-python3-runtime==4.9.3"
ENVIRONMENTS = {
    "areal": Environment(
        "areal.engine.vllm_remote",
        f"areal==1.0.4 aiofiles blinker colorlog flask {HYDRA} itsdangerous orjson pybase64 ray tabulate tenacity "
        "tensorboardX torchdata werkzeug zstandard",
    ),
    "art": Environment(
        "art",
        "openpipe-art==0.5.18 distro fastuuid importlib-metadata litellm==1.82.0 nest-asyncio openai<3 polars "
        "polars-runtime-32 setproctitle tblib tenacity weave zipp",
    ),
    "ms_swift": Environment(
        "swift.rlhf_trainers.grpo_trainer",
        "ms-swift==4.6.0 trl<1 peft<0.21 datasets<4.8.5 absl-py addict attrdict binpacking cpm-kernels dacite "
        "json-repair modelscope modelscope-hub nltk oss2 rouge simplejson tensorboard transformers-stream-generator "
        "zstandard",
    ),
    "nemo_gym": Environment(
        "responses_api_models.openai_model.app",
        "nemo-gym==0.4.0 aiohttp anthropic<=0.109.2 fastapi gprof2dot hydra-core itsdangerous numpy openai<=2.7.2 "
        "orjson psutil pydot python-multipart ray requests rich tqdm uvicorn uvloop wandb yappi",
        python="python3.12",
    ),
    # pip finds what OpenEnv requires: many small packages, and neither torch nor vLLM.
    "openenv": Environment(
        "openenv.core.harness",
        "openenv==0.10.0 fastapi fastmcp>=3,<4 httpx huggingface_hub>=1.29 jsonschema openai<3 pydantic pyyaml "
        "requests rich tomli tomli-w typer uvicorn websockets",
        python="python3",
    ),
    "openrlhf": Environment("openrlhf.utils.agent", "openrlhf==0.11.2 pylatexenc"),
    "skyrl": Environment(
        "skyrl.tinker.api",
        "skyrl==0.3.0 skyrl-gym==0.4.0 tinker==0.22.4 uv absl-py aiosqlite antlr4-python3-runtime==4.9.3 cloudpathlib "
        "distro etils flax==0.12.8 func_timeout h2 hpack humanize hyperframe jax==0.10.2 jaxlib==0.10.2 ml_dtypes "
        "omegaconf opt_einsum optax==0.2.8 orbax-checkpoint==0.12.8 orjson pyqwest scipy simplejson sqlalchemy<2.2 "
        "sqlmodel tensorstore treescope zstandard",
        # Below Python 3.12, pydantic refuses the class of SkyRL's types.
        at_start="import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict",
    ),
    "verifiers": Environment(
        "verifiers.v1",
        "verifiers==0.4.0 antlr4-python3-runtime==4.13.2 aiofiles connectrpc<0.12 distro gepa latex2sympy2-extended "
        "math-verify mcp==2.0.0 openai<3 openai-harmony prime-pydantic-config prime-runs prime-sandboxes prime-traces "
        "prime-tunnel protobuf-py==0.1.1 protobuf-py-ext==0.1.1 pyqwest renderers tenacity uv",
    ),
    "verl": Environment(
        "verl.trainer.main_ppo",
        f"verl==0.9.1 TransferQueue codetiming {HYDRA} orjson pybind11 pylatexenc pyvers ray tensordict==0.10.0 "
        "torchdata",
    ),
}


class NotInstalled(Exception):
    """A package cannot be downloaded or installed; the message has pip's last lines."""


def create_or_skip(name: str) -> Path:
    """Return the Python of an environment; skip the test if the environment cannot be installed here."""
    try:
        return create(name)
    except NotInstalled as error:
        pytest.skip(f"{name} cannot be installed here: {error}")


def create(name: str) -> Path:
    """Create an environment, unless it is there as wanted; return its Python.

    Raises:
        NotInstalled
    """
    home, wanted = FOLDER / name, ENVIRONMENTS[name]
    python, stamp = home / "bin" / "python", home / "installed"
    packages = wanted.packages.split()
    text = "\n".join((wanted.python or sys.prefix, wanted.module, *packages, wanted.at_start)).rstrip()
    if stamp.exists() and stamp.read_text() == text:
        return python
    # Without a command of its own the Python of .venv, so that compiled packages fit.
    _run([wanted.python or sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)])
    install = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "-q"]
    if wanted.python is None:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = f"lib/{version}/site-packages"
        (home / site / "base.pth").write_text(f"{Path(sys.prefix) / site}\n{wanted.at_start}\n")
        _run([*install, "--no-deps", *packages])
    else:
        _run([*install, "--no-deps", packages[0]])
        _run([*install, *packages[1:]])
    _run([str(python), "-c", f"import {wanted.module}"])
    stamp.write_text(text)
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        raise NotInstalled(f"{command[0]} took longer than {SECONDS} s") from error
    except FileNotFoundError as error:
        raise NotInstalled(f"{command[0]} is not on this machine") from error
    if done.returncode:
        raise NotInstalled("; ".join((done.stderr or done.stdout).splitlines()[-3:]))


if __name__ == "__main__":
    for each in sys.argv[1:] or ENVIRONMENTS:
        print(each, create(each))
