"""`kvtier replay`: a trace of agent sessions against a real daemon, with a worker that is modelled or real."""

from kvtier.replay.modelled import ModelledEngine
from kvtier.replay.options import Memory, Rates, ReplayOptions, Workload
from kvtier.replay.run import replay

__all__ = ["Memory", "ModelledEngine", "Rates", "ReplayOptions", "Workload", "replay"]
