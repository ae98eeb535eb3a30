"""The demo: a real conversation whose KV cache travels between device, host memory and Redis."""

from kvtier.demo.run import run_demo

__all__ = ["run_demo"]
