"""Where page images lie: the device pool, the host pool, Redis; and the mover, the only thing that copies between them."""
