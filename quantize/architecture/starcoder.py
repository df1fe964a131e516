"""starcoder: gpt2 with one key-value head."""

from edgert.quantize.architecture.gpt2 import describe

__all__ = ["describe"]
