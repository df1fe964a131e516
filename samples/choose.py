"""Asks a model which of several endings is the most likely, by the logits of their tokens.

python samples/choose.py [MODEL]
"""

import sys

import numpy as np

import edgert

TEXT = "The capital of France is"
ENDINGS = [" Paris", " Berlin", " a banana"]

with edgert.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2", n_ctx=256) as model:
    start = model.tokenize(TEXT)
    for ending in ENDINGS:
        ids = start + model.tokenize(ending, add_special=False)
        logits = model.logits(ids).astype(np.float64)
        logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        score = sum(logprobs[i - 1, ids[i]] for i in range(len(start), len(ids)))
        print(f"{score:8.2f}  {TEXT}{ending}")
