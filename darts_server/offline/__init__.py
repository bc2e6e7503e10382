"""Commands that run without serving: the demo, the simulation, and the conversion of logs to traces."""
