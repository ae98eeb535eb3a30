"""The cache of one model on one host: the one place where the index, the pools and the mover meet."""

from kvtier.cache.prefix_cache import Acquired, CommitResult, Drained, PrefixCache, Prompt, TokensByTier, Wait
from kvtier.cache.writer import WritePolicy

__all__ = ["Acquired", "CommitResult", "Drained", "PrefixCache", "Prompt", "TokensByTier", "Wait", "WritePolicy"]
