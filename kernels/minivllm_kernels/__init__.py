"""Kernels: what the engine computes itself where a library is too slow. Knows nothing of `minivllm`.

`cpu` holds C++ for CPUs, compiled on first use; `gpu` holds Triton, which is optional and imported by its kernels only;
`report` says what those compile to.
"""
