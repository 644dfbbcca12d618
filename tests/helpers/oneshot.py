"""llm-compressor's own GPTQ of a whole model in memory, to compare with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ktconv.quantize.llm_compressor.library import quiet


def oneshot_experts(
    directory: Path,
    experts: Sequence[int],
    samples: Sequence[Sequence[int]],
    weights: Any,
    dampening: float,
) -> dict[str, Any]:
    """Weights of these experts of each layer after `oneshot`, in bf16, by the name of their linear
    layer; no others are rounded."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    with quiet():
        from compressed_tensors.quantization import QuantizationScheme
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        take_experts_apart(model)
        pattern = rf".*experts\.({'|'.join(map(str, experts))})\..*_proj$"
        scheme = QuantizationScheme(targets=[f"re:{pattern}"], weights=weights)
        rows: Any = [{"input_ids": torch.tensor([list(ids)])} for ids in samples]
        with _causal_attention():
            oneshot(
                model=model,
                processor=object(),
                recipe=GPTQModifier(config_groups={"experts": scheme}, dampening_frac=dampening),
                dataset=DataLoader(rows, batch_size=None),
                pipeline="sequential",
            )
    return {
        path: module.weight.detach()
        for path, module in model.named_modules()
        if re.fullmatch(pattern, path)
    }


def take_experts_apart(model: Any) -> None:
    """Each projection of each expert becomes a linear layer."""
    from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
    from llmcompressor.modeling.moe.linearize import get_non_linearized_moes

    for path in [path for path, _ in get_non_linearized_moes(model)]:
        fused = model.get_submodule(path)
        kind = LinearExperts2D.get_linear_experts_cls(type(fused))
        config = getattr(fused, "config", model.config)
        model.set_submodule(path, kind.from_experts_module(fused, config))


@contextmanager
def _causal_attention() -> Iterator[None]:
    """llm-compressor 0.14 switches models to eager attention, but rebuilds their config without
    that setting: no causal mask is made then, and every token attends to the whole text."""
    from llmcompressor.pipelines.sequential.helpers import SequentialTracer
    from llmcompressor.utils import helpers
    from transformers import PreTrainedConfig

    from ktconv.model.load import replaced

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
