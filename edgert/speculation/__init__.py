"""Speculative decoding: cheap guesses at the next tokens, which the model checks in one step.

A guess counts where it equals the token that the model itself chooses there. Since a choice depends on the logits, the
seed and the place in the text alone (see `edgert.sampler`), a reply is the same token for token with and without
guesses, at any temperature; only the time differs.
"""

from edgert.speculation.speculator import Speculator

__all__ = ["Speculator"]
