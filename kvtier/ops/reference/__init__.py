"""The operations in torch: they run on any device and say what every kernel must compute.

They read lengths and page numbers on the host, so on a GPU they wait for it.
"""
