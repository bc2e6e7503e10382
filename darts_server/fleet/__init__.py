"""Many engines behind one process: connections to their hosts, and which of them runs what. No vLLM, no Ray."""
