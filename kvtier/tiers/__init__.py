"""Where page images lie: device pool, host pool, Redis; and the mover, the only thing that copies between them."""
