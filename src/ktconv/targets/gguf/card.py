"""The model card of a GGUF output."""

from __future__ import annotations

import shlex

from ktconv import __version__
from ktconv.conversion.records import ErrorSummary
from ktconv.source.source_card import SourceCard
from ktconv.system.units import format_ranges, format_size
from ktconv.targets.card import errors_line, header, model_name, view_lines, view_words
from ktconv.targets.gguf.target import Plan


def command_line(name: str, plan: Plan) -> str:
    """The command that gives the same files again."""
    options = plan.target.options
    words = ["ktconv quantize-cpu", shlex.quote(name), "OUTPUT", f"--method {options.method}"]
    words.append(f"--max-shard-size {options.max_shard_size}")
    words += ["--with FILE.gguf"] if options.beside else []
    words += ["--importance FILE"] if options.importance else []
    words += [] if options.mtp else ["--no-mtp"]
    words += ["--requantize"] if options.requantize else []
    words += view_words(plan.checkpoint.adapters, plan.checkpoint.pruning is not None)
    return " ".join(words)


def gguf_card(plan: Plan, source: SourceCard, errors: ErrorSummary) -> str:
    """README.md: what is in the files, what loads them, and the command."""
    target, name = plan.target, source.name or model_name(plan.checkpoint.path)
    content = "all tensors" if plan.others else "expert weights only"
    importance = target.options.importance
    weighed = "" if importance is None else f", weighted by {importance.file}"
    first = target.shard_name(1, sum(len(unit.shard_counts) for unit in plan.units))
    loads = []
    if plan.others:
        loads += ["llama.cpp loads the model by its first file:", "", f"    llama-cli -m {first}"]
    if (serving := target.serving()) is not None:
        loads += ["", "KTransformers loads the experts:", "", f"    {serving} OUTPUT"]
    library = "gguf" if plan.others else "ktransformers"
    return f"""---
{header(source, library, ["ktconv", "mixture-of-experts", "gguf", target.format.type.lower()])}
---

# {name}: experts in {target.format.type}

The routed experts of {name} in GGUF files:
{target.description}, {content}, {format_size(plan.output_bytes)}.

- MoE layers: {format_ranges([layer.index for layer in plan.moe_layers])}
- Tensors: `blk.{{layer}}.ffn_{{{",".join(plan.moe_layers[0].projections)}}}_exps.weight`
- Scales and codes by a search for the smallest squared error of each block{weighed}
{errors_line(errors, plan.checkpoint.layers)}{view_lines(plan)}- `ktconv.json` has a checksum \
and the quantization error of every tensor.

{chr(10).join(loads)}

Made with ktconv {__version__}:

    {command_line(source.argument or name, plan)}
"""
