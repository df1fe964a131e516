"""Bits and floats: GGUF files, number formats, architectures. It imports nothing of backends or devices."""
