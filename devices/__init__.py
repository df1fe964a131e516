"""What this machine is, and what fits on it. It imports nothing of quantize or backends."""
