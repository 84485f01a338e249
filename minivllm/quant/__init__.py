"""Number formats: how weights are stored in few bits, and what they stand for."""
