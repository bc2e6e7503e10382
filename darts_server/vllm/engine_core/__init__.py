"""Runs in vLLM's engine process (`plugin`, `holding`) and in its workers (`worker`, `probe_capture`, `probe_steps`).

vLLM imports it there by the entry point ``vllm.general_plugins`` and by ``--worker-extension-cls``. The API process
imports its names and message types alone.
"""
