"""Verifiers: functions that give answers their rewards, and the processes that run them."""
