"""What a bundle holds and what it leaves out, each with its reason. All of it is data."""

from dataclasses import dataclass

VLLM_FOR_TORCH = {"2.11.0": "0.26.0", "2.13.0": "0.31.0", "2.14.0": "0.33.0"}
"""A vLLM built for each torch, as its extension modules load with no other: the one we test with, or the newest."""

EXTENSIONS = {"triton": frozenset[str](), "fa3": frozenset({"fa3"}), "fa2": frozenset({"fa2"})}
EXTENSIONS["all"] = EXTENSIONS["fa3"] | EXTENSIONS["fa2"]
"""Parts of vLLM that each choice of attention brings."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Files of a wheel that stay behind unless one of ``unless`` is asked for. In ``pattern`` a * crosses folders."""

    pattern: str
    why: str
    unless: frozenset[str] = frozenset()


FILES = (
    LeftOut("vllm/vllm_flash_attn/_vllm_fa2_C*", "FlashAttention 2: --attention fa2 or all", frozenset({"fa2"})),
    LeftOut("vllm/vllm_flash_attn/_vllm_fa3_C*", "FlashAttention 3: --attention fa3 or all", frozenset({"fa3"})),
    LeftOut("vllm/_moe_C*", "kernels of mixture-of-experts models: --moe", frozenset({"moe"})),
    LeftOut("vllm/vllm-rs", "the front end in Rust; the one in Python is the default"),
    LeftOut("vllm/third_party/deep_gemm/*", "FP8 kernels that a compiler builds at run time, with its headers"),
    LeftOut("vllm/third_party/fmha_sm100/*", "attention for Blackwell that a compiler builds at run time"),
    LeftOut("vllm/third_party/tml_fa4/*", "needs nvidia-cutlass-dsl"),
)

_BACKEND = "only kernels that are not the default need it"
_VIDEO = "decodes videos"
_MISTRAL = "Mistral's own tokenizer: models that ship another one do without"
_TRACING = "traces requests: --otlp-traces-endpoint"
_TOOLS = "tools by the Model Context Protocol: --tool-server"
_OTHER_GRAMMARS = "structured output by a backend that is not the default"
_COMMANDS = "the command line of FastAPI"
PACKAGES = {
    "anthropic": "the types of Anthropic's API are vLLM's own",
    "blake3": "hashes images",
    "depyf": "prints compiled code for debugging",
    "email-validator": "FastAPI does without",
    "fastapi-cli": _COMMANDS,
    "fastar": _COMMANDS,
    "fastsafetensors": "another loader of weights",
    "flashinfer-python": _BACKEND,
    "humming-kernels": _BACKEND,
    "ijson": _MISTRAL,
    "jsonschema": _MISTRAL,
    "lark": _OTHER_GRAMMARS,
    "lm-format-enforcer": _OTHER_GRAMMARS,
    "mcp": _TOOLS,
    "mistral-common": _MISTRAL,
    "nvidia-cudnn-frontend": _BACKEND,
    "nvidia-cutlass-dsl": _BACKEND,
    "nvtx": "marks for a profiler",
    "opentelemetry-api": _TRACING,
    "opentelemetry-exporter-otlp": _TRACING,
    "opentelemetry-sdk": _TRACING,
    "opentelemetry-semantic-conventions-ai": _TRACING,
    "outlines-core": _OTHER_GRAMMARS,
    "pydantic-extra-types": "FastAPI does without",
    "pynvvideocodec": _VIDEO,
    "python-json-logger": "logs as JSON",
    "quack-kernels": _BACKEND,
    "supervisor": "runs vLLM under a hosting service",
    "tilelang": _BACKEND,
    "tokenspeed-mla": _BACKEND,
    "torchcodec": _VIDEO,
    "websockets": "no route of ours is a WebSocket",
}
"""By canonical name; vLLM starts and serves without them. ``--with NAME`` brings one, and what it needs, all the same.

Not here, though vLLM means to import them late: xgrammar and llguidance. Annotations of its classes load them at once.
"""

_BUILT_AGAINST = "what else is installed there was built against it"
KEPT = {
    "numpy": _BUILT_AGAINST,
    "scipy": _BUILT_AGAINST,
    "torch": _BUILT_AGAINST,
    "torchaudio": _BUILT_AGAINST,
    "torchvision": _BUILT_AGAINST,
    "transformers": _BUILT_AGAINST,
    "triton": _BUILT_AGAINST,
    "numba": "vLLM pins one version, and uses what all have",
    "setuptools": "needed to build extensions, which nobody does there",
}
"""Packages of the target's that are never replaced, even against vLLM's requirements."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A change to a file that is bundled, made unless one of ``unless`` is asked for."""

    path: str
    old: str
    new: str
    why: str
    unless: frozenset[str] = frozenset()


EDITS = (
    Edit(
        "vllm/v1/attention/backends/fa_utils.py",
        "    from vllm.vllm_flash_attn import (  # type: ignore[attr-defined]\n"
        "        compile_flash_attn_varlen_func_from_specs,\n"
        "        flash_attn_varlen_func,\n"
        "        get_scheduler_metadata,\n"
        "    )\n",
        "    try:  # changed when bundled: was outside of a try\n"
        "        from vllm.vllm_flash_attn import (  # type: ignore[attr-defined]\n"
        "            compile_flash_attn_varlen_func_from_specs,\n"
        "            flash_attn_varlen_func,\n"
        "            get_scheduler_metadata,\n"
        "        )\n"
        "    except ImportError:\n"
        "        pass\n",
        "every layer imports this module, which without any FlashAttention fails on CUDA; now only its backend does",
        frozenset({"fa2", "fa3"}),
    ),
)

ROOTS = (
    "vllm",
    "vllm.v1.engine.async_llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.platforms.cuda",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.tokenizers.hf",
    "darts_server.app",
    "darts_server.vllm.server",
    "darts_server.vllm.worker",
    "darts_client",
)
"""Modules that must import there. vLLM finds the platform, worker, backend and model by name, which no scan sees."""

ROUTES = "vllm/entrypoints/**/*router.py", "vllm/entrypoints/serve/instrumentator/*.py"
"""Files that hold vLLM's routes: imported when it builds its app. Which there are depends on its version."""

NEEDED_BY_EXAMPLES = ("httpx", "psutil", "rich", "tqdm", "tokenizers", "transformers", "matplotlib")
"""What ``benchmarks`` and ``examples`` import beside the server's own requirements."""

FOLDERS = ("darts_server", "clients/darts_client", "benchmarks", "examples")

MODULES = {
    "absl-py": ("absl",),
    "attrs": ("attr", "attrs"),
    "cuda-bindings": ("cuda",),
    "fonttools": ("fontTools",),
    "grpcio": ("grpc",),
    "nvidia-ml-py": ("pynvml",),
    "opencv-python-headless": ("cv2",),
    "pillow": ("PIL",),
    "protobuf": ("google",),
    "py-cpuinfo": ("cpuinfo",),
    "python-dateutil": ("dateutil",),
    "pyyaml": ("yaml",),
    "scikit-learn": ("sklearn",),
    "setuptools": ("setuptools", "pkg_resources", "distutils"),
}
"""Top modules of distributions that are not called by their distribution's name."""
