"""Several questions at once in an event loop: they share the engine's steps.

python samples/async_requests.py [MODEL]
"""

import asyncio
import sys

import edgert

QUESTIONS = ["Name a colour.", "Name an animal.", "Name a river."]


async def main(model_name: str) -> None:
    with edgert.load(model_name, n_ctx=1024) as model:

        async def ask(question: str) -> str:
            reply = await model.achat([{"role": "user", "content": question}], max_tokens=30)
            return reply.text

        for question, answer in zip(QUESTIONS, await asyncio.gather(*map(ask, QUESTIONS)), strict=True):
            print(f"{question} -> {' '.join(answer.split())}")

        async for piece in model.generate("Once upon a time", stream=True, max_tokens=30):
            print(piece.text, end="", flush=True)
        print()


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
