"""Stops an answer from another thread after a second, and keeps what was said until then.

python samples/time_limit.py [MODEL]
"""

import sys
import threading

import edgert

with edgert.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2", n_ctx=2048) as model:
    stream = model.generate("Once upon a time", stream=True, ignore_eos=True)
    alarm = threading.Timer(1.0, stream.cancel)
    alarm.start()
    reply = stream.reply()
    alarm.cancel()
    print(reply.text)
    print(f"[{reply.finish_reason} after {len(reply.tokens)} tokens]")
