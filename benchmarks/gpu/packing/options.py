"""What may be asked of ``pack``."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from benchmarks.gpu.packing.asked import vllm_for
from benchmarks.gpu.packing.rules import EXTENSIONS, PACKAGES
from benchmarks.gpu.packing.target import Target, read_installed

TYPICAL = Path(__file__).parent.parent / "typical.txt"
MEGABYTE = 1_000_000
DESCRIPTION = """\
Makes a bundle of vLLM and this project for a GPU machine that has torch, but neither vLLM nor a network.

Needs a package registry, through pip as pip is configured, and no GPU. The bundle holds what vLLM and this project
import beside the packages that the target has already. What only unused features need is left out; the manifest says
what and why. It comes in parts with checksums, together with the program that lays them out on the target.
"""
EPILOG = """\
examples:
  benchmarks/gpu/pack                                       for Python 3.12, torch 2.11.0, a Hopper GPU
  benchmarks/gpu/pack --installed freeze.txt --python 3.12  for the machine where `pip freeze > freeze.txt` was run
  benchmarks/gpu/pack --arch 90                             half of that: device code for Hopper only
  benchmarks/gpu/pack --attention triton                    no FlashAttention: vLLM then takes its Triton kernels

Then bring all files of --out to the target, at once or one at a time, and run `python3 unpack` there.

status: 0 the bundle is made, 1 it is made but something that is imported at start is missing, 2 wrong use or no such
packages.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Checked, and with every default filled in. ``wanted``: parts of vLLM to bring; ``part_size`` in bytes."""

    target: Target
    vllm: str
    attention: str
    wanted: frozenset[str]
    architecture: int | None
    extra: tuple[str, ...]
    out: Path
    wheels: Path
    part_size: int
    level: int
    threads: int
    check: bool


def arguments(argv: Sequence[str] | None) -> Options:
    parser = _parser()
    chosen = parser.parse_args(argv)
    try:
        target = _target(chosen)
        vllm = chosen.vllm or vllm_for(target.torch or "")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if chosen.part_size <= 0 or chosen.threads < 1:
        parser.error("--part-size and --threads must be above 0")
    return Options(
        target=target,
        vllm=vllm,
        attention=chosen.attention,
        wanted=EXTENSIONS[chosen.attention] | ({"moe"} if chosen.moe else set()),
        architecture=chosen.arch,
        extra=tuple(canonicalize_name(name) for name in chosen.extra),
        out=chosen.out,
        wheels=chosen.wheels,
        part_size=int(chosen.part_size * MEGABYTE),
        level=chosen.level,
        threads=chosen.threads,
        check=not chosen.no_check,
    )


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "benchmarks/gpu/pack", description=DESCRIPTION, epilog=EPILOG, formatter_class=form
    )

    target = parser.add_argument_group("the target").add_argument
    target("--python", default="3.12", type=_two_numbers, metavar="X.Y", help="its Python (default: %(default)s)")
    target("--torch", metavar="VERSION", help="its torch (default: that of --installed)")
    listed = "its packages, from `pip freeze` or `pip list --format=json` (default: typical.txt, beside this program)"
    target("--installed", type=Path, default=TYPICAL, metavar="FILE", help=listed)
    target("--glibc", default="2.35", type=_two_numbers, metavar="2.N", help="its C library (default: %(default)s)")

    what = parser.add_argument_group("what to bring").add_argument
    what("--vllm", metavar="VERSION", help="which vLLM (default: one that is built for the target's torch)")
    attention = "FlashAttention 3, for Hopper, or 2, for other GPUs, or both, or neither (default: %(default)s)"
    what("--attention", choices=EXTENSIONS, default="fa3", help=attention)
    what("--moe", action="store_true", help="kernels of mixture-of-experts models too")
    what(
        "--arch", type=int, metavar="NN", help="device code for this compute capability only, 90 for 9.0 (default: all)"
    )
    extra = "a package that is left out otherwise; may be repeated"
    what("--with", action="append", default=[], dest="extra", metavar="NAME", choices=sorted(PACKAGES), help=extra)

    how = parser.add_argument_group("how").add_argument
    how("--out", type=Path, default=Path("out/gpu/bundle"), metavar="DIR", help="the bundle (default: %(default)s)")
    kept = "keeps what was downloaded, for the next time (default: %(default)s)"
    how("--wheels", type=Path, default=Path("out/gpu/wheels"), metavar="DIR", help=kept)
    how("--part-size", type=float, default=60, metavar="MB", help="of a part, at most (default: %(default)s)")
    how("--level", type=int, choices=range(10), default=6, help="of xz (default: %(default)s)")
    how("--threads", type=int, default=2, metavar="N", help="of xz (default: %(default)s)")
    how("--no-check", action="store_true", help="do not look for imports that nothing provides")
    return parser


def _two_numbers(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers, as in 3.12")
    return text


def _target(chosen: argparse.Namespace) -> Target:
    installed = read_installed(chosen.installed.read_text(encoding="utf-8"))
    if chosen.torch:
        installed["torch"] = chosen.torch
    if not installed.get("torch"):
        raise ValueError(f"{chosen.installed} has no torch with a version: say --torch")
    return Target(chosen.python, chosen.glibc, installed)
