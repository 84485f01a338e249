"""Who runs: the scheduler, its policies, and the trace of what it decided. No torch, no numpy."""
