"""Fault injection: break one thing of a running server, and check that everything else still works."""
