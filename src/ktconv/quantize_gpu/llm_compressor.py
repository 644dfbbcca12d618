"""llm-compressor and its dependencies without their progress bars and logs.

Import this before any of them: llm-compressor sets up its logs, on stdout, while it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from logging import getLogger
from typing import Any

from ktconv.model.load import no_progress, replaced

# Users can set another level. LLM_COMPRESSOR_LOG_DISABLED would end in an error.
os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "CRITICAL")
_MODULES_WITH_BARS = (
    "compressed_tensors.offload.dispatch",
    "compressed_tensors.quantization.lifecycle.apply",
    "llmcompressor.pipelines.cache",
    "llmcompressor.pipelines.sequential.pipeline",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and warnings: ktconv reports progress itself, by layers."""
    from loguru import logger

    loggers = ("torch.fx", "torch.fx._symbolic_trace")
    with silenced(_MODULES_WITH_BARS, loggers), no_progress():
        logger.disable("compressed_tensors")
        try:
            yield
        finally:
            logger.enable("compressed_tensors")


@contextmanager
def silenced(modules: Sequence[str], loggers: Sequence[str]) -> Iterator[None]:
    """Without progress bars of these modules and warnings of these loggers and transformers."""
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


@contextmanager
def causal_attention() -> Iterator[None]:
    """The sequential pipeline with the attention that the model has anyway.

    llm-compressor 0.14 switches models to eager attention, but rebuilds their config without that
    setting. No causal mask is made then, and every token attends to the whole text. With the
    model's own attention recorded in the config, attention is causal, and needs no matrix of all
    pairs of tokens.
    """
    from llmcompressor.pipelines.sequential.helpers import SequentialTracer
    from llmcompressor.utils import helpers
    from transformers import PreTrainedConfig

    create_arg = SequentialTracer.create_arg

    def with_attention(tracer: Any, value: Any) -> Any:
        node = create_arg(tracer, value)
        if isinstance(value, PreTrainedConfig):
            node.kwargs = {**node.kwargs, "attn_implementation": value._attn_implementation}
        return node

    with (
        replaced(helpers, "use_eager_attention", lambda _model: nullcontext()),
        replaced(SequentialTracer, "create_arg", with_attention),
    ):
        yield
