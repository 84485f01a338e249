"""Where KV lives: block pool, prefix hashes, block tables, the manager. No torch, no numpy."""
