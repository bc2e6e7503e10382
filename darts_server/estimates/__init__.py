"""Estimates from finished groups: lengths, decode latency, rewards, losses at deadlines, calibration of scores.

All are pure: numbers in, numbers out. `rollout/learned` keeps them for the server. `answers` extracts the answer of a
text, which votes and verifiers compare.
"""
