"""Runs in vLLM's engine process (`plugin`, `holding`) and in its workers (`worker`, `probe_capture`, `probe_steps`).

vLLM imports this room there, by the entry point ``vllm.general_plugins`` and by ``--worker-extension-cls``. The API
process imports only names and message types from it.
"""
