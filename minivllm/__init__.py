"""minivllm: an LLM inference engine small enough to read in a weekend, complete enough to serve a real model."""

__version__ = "0.1.0"
