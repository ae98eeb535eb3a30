"""`kvtier serve`: caches, sessions and operators' calls behind gRPC."""
