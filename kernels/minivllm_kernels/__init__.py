"""Kernels: what the engine computes itself where a library is too slow. Knows nothing of `minivllm`.

`cpu` holds C++ for CPUs, compiled on first use.
"""
