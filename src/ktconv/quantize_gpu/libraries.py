"""llm-compressor and what comes with it, without their bars and logs.

Import this before any of them: llm-compressor sets up its logs, on stdout, while it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from logging import getLogger
from typing import Any

# Who wants to see them can set another level. LLM_COMPRESSOR_LOG_DISABLED would end in an error.
os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "CRITICAL")
_WITH_BARS = (
    "compressed_tensors.offload.dispatch",
    "compressed_tensors.quantization.lifecycle.apply",
    "llmcompressor.pipelines.cache",
    "llmcompressor.pipelines.sequential.pipeline",
)


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no warnings meanwhile: progress is told by layers, and only by us."""
    from loguru import logger
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with ExitStack() as stack:
        for name in _WITH_BARS:
            stack.enter_context(replaced(import_module(name), "tqdm", _no_bar))
        for name in ("torch.fx", "torch.fx._symbolic_trace", "accelerate.big_modeling"):
            stack.enter_context(replaced(getLogger(name), "disabled", True))
        logger.disable("compressed_tensors")
        stack.callback(logger.enable, "compressed_tensors")
        logging.set_verbosity_error()
        stack.callback(logging.set_verbosity, verbosity)
        logging.disable_progress_bar()
        if bars:
            stack.callback(logging.enable_progress_bar)
        yield


def _no_bar(iterable: Any, *_: Any, **__: Any) -> Any:
    return iterable


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute of a library, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
