"""The loop between tokenizer and backend: requests of any number of callers share each forward step.

task    what callers ask for: a text continued, a text scored
slots   the backend's sequences, and what of earlier prompts they hold
engine  the thread that runs tasks together, one step after the other
"""

from edgert.generation.engine import Engine
from edgert.generation.task import Generation, Scoring, Task

__all__ = ["Engine", "Generation", "Scoring", "Task"]
