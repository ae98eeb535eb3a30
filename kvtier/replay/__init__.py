"""`kvtier replay`: a trace of agent sessions against a real daemon, with a modelled worker in virtual time."""

from kvtier.replay.options import Memory, Rates, ReplayOptions, Workload
from kvtier.replay.run import replay

__all__ = ["Memory", "Rates", "ReplayOptions", "Workload", "replay"]
