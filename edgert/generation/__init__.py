"""The loop between tokenizer and backend: requests of any number of callers share each forward step.

task       what callers ask for: a text continued, a text scored
limits     what an engine is told at its start
schedule   whose turn it is, and how much of whose prompt a step reads
prefix     which sequences hold which beginnings of prompts
slots      the backend's sequences, who has which, and who may displace whom
metrics    what is counted and timed
admission  what may begin and when, and what leaves
lockstep   the tasks that run, and the step that takes all of them further
engine     the thread in which this happens, and what callers have of it
"""

from edgert.generation.engine import Engine
from edgert.generation.limits import Limits
from edgert.generation.metrics import Snapshot
from edgert.generation.task import Caller, Generation, Reading, Scoring, Task, Weighing

__all__ = ["Caller", "Engine", "Generation", "Limits", "Reading", "Scoring", "Snapshot", "Task", "Weighing"]
