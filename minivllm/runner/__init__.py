"""A step plan in, logits out: flat batches and attention over the paged cache."""
