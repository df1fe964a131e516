"""Low-bit language models on the machine in front of you."""
