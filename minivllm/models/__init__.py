"""Weights, tokenizers and the decoder that runs them."""
