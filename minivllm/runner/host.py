"""What the engine asks of the operating system's C library."""

from __future__ import annotations

import ctypes
import logging
import sys

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
LARGEST_MMAP_THRESHOLD = 32 * 2**20
NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have malloc keep freed memory for the next tensor instead of returning it; True where that worked (glibc).

    A prefill step allocates and frees megabytes in each layer. By default glibc gives large pieces back to the kernel
    at once, and the next layer pays for them anew: a page fault and 4 KiB of zeroing for every page, 200,000 times in a
    prompt of 2,048 tokens. Kept memory is at most what a step needs at its peak.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        log.info("this C library has no mallopt: steps with many tokens pay for fresh memory in every layer")
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, NEVER_TRIM))


def return_freed_memory() -> bool:
    """Have malloc return freed memory to the kernel, once; True if some was (glibc). After loading that is about as much as
    the weights as they were read: freed, but between tensors that live on, so that they would stay resident."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0))
