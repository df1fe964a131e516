"""llama.cpp behind the waist, by llama-cpp-python's low-level API (extra `gpu`): the same batches, another engine."""
