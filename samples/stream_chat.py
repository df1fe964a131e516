"""Answers a question piece by piece, then asks for more: the second turn reads only what is new.

python samples/stream_chat.py [MODEL] [QUESTION]
"""

import sys

import edgert

model_name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
question = sys.argv[2] if len(sys.argv) > 2 else "What is gravity?"

with edgert.load(model_name, n_ctx=2048) as model:
    print(model.verdict)
    messages = [{"role": "user", "content": question}]
    for follow_up in ("Say that in one short sentence.", None):
        answer = ""
        for piece in model.chat(messages, stream=True, max_tokens=100):
            print(piece.text, end="", flush=True)
            answer += piece.text
        print(f"\n[{piece.finish_reason}: {piece.stats.prompt_n} tokens read, {piece.stats.cache_n} from the cache]")
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
