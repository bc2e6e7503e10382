"""Commands that run without a server: demo, simulation, and export of learned lengths."""
