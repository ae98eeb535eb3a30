"""kvtier: an NVFP4 KV-cache tiering daemon.

Importing the package needs no GPU, no Redis and no model library; it opens no file and starts nothing.
"""

__version__ = "0.1.0"
