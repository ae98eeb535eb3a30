"""The cache of one model on one host: the one place where the index, the pools and the mover meet."""

from kvtier.cache.prefix_cache import Acquired, Drained, PrefixCache, Prompt, Wait
from kvtier.cache.writer import WritePolicy

__all__ = ["Acquired", "Drained", "PrefixCache", "Prompt", "Wait", "WritePolicy"]
