"""torch and the workers of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Threads that begin meanwhile compute with torch alone: the pipeline's workers are enough, and
    sums have the same bits for any number of them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
