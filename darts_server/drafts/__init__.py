"""Drafts for speculative decoding: which tokens probably come next, by what samples of the same prompts have answered.

`contexts` counts continuations, `acceptance` learns how often such drafts are right, and `lengths` decides how many
tokens of each draft are worth their verification. `recall` counts what others have answered. All but `lengths` compile
with numba, in vLLM's workers alone. `history` keeps answers in the server's process.
"""
