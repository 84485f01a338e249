"""Logits to token to text: sampling, streaming detokenisation, stop strings."""
