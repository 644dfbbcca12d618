"""llm-compressor and its dependencies without their progress bars and logs.

Import this before any of them: llm-compressor sets up its logs, on stdout, while it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from logging import getLogger
from typing import Any

from ktconv.errors import UsageError
from ktconv.model.load import no_progress, replaced

# Users can set another level. LLM_COMPRESSOR_LOG_DISABLED would end in an error.
os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "CRITICAL")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and warnings: ktconv reports progress itself, by layers."""
    from loguru import logger

    with silenced((), ()), no_progress():
        logger.disable("compressed_tensors")
        try:
            yield
        finally:
            logger.enable("compressed_tensors")


@contextmanager
def silenced(modules: Sequence[str], loggers: Sequence[str]) -> Iterator[None]:
    """Suppress progress bars of these modules and warnings of these loggers and transformers."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity = logging.get_verbosity()
    with ExitStack() as stack:
        for name in modules:
            stack.enter_context(replaced(import_module(name), "tqdm", _no_bar))
        for name in loggers:
            stack.enter_context(replaced(getLogger(name), "disabled", True))
        stack.callback(logging.set_verbosity, verbosity)
        logging.set_verbosity_error()
        yield


def _no_bar(iterable: Any, *_: Any, **__: Any) -> Any:
    return iterable


def device_of(name: str) -> str:
    """The device that `--device` means. UsageError for one that PyTorch does not see here."""
    import torch

    name = name.lower()
    found = torch.accelerator.current_accelerator(check_available=True)
    there = ["cpu"]
    if found is not None:
        there += [
            found.type,
            *(f"{found.type}:{n}" for n in range(torch.accelerator.device_count())),
        ]
    if name == "auto":
        return there[1] if found else "cpu"
    if name not in there:
        raise UsageError(
            f"--device {name} cannot be used: PyTorch sees {', '.join(there)} here",
            "use one of these, or install a PyTorch build for your GPU",
        )
    return name
