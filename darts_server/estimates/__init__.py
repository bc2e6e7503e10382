"""Estimates from what has run: lengths of prompts, latency of decode steps, rewards, losses at deadlines, calibration.

Each is a plain object with numbers in and numbers out. `rollout/learned` keeps them for the server.
"""
