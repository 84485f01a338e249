"""Kernels in Triton run in its interpreter here, on the CPU. It's asked for before anything imports Triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"
