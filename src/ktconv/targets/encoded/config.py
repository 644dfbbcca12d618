"""config.json, recipe.yaml and README.md of a checkpoint with encoded experts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ktconv import __version__
from ktconv.conversion.records import ErrorSummary
from ktconv.source.activations import in_words
from ktconv.source.source_card import SourceCard
from ktconv.system.units import format_ranges, format_size
from ktconv.targets.card import (
    errors_line,
    header,
    mismatch_paragraph,
    model_name,
    uneven_paragraph,
    view_lines,
    view_words,
)
from ktconv.targets.consumers import mismatch_of, model_types
from ktconv.targets.encoded.engines import ENGINES, engine_lines, why_not
from ktconv.targets.encoded.ignored import Stored, ignored_modules
from ktconv.targets.encoded.layouts.packed import PACK_QUANTIZED
from ktconv.targets.encoded.naming import BLK, V4
from ktconv.targets.encoded.readers import SGLANG_KT, TRANSFORMERS, VLLM, listed, readers_of
from ktconv.targets.encoded.recipe import Share, shares
from ktconv.targets.encoded.scheme import MIXED, SCHEMES, Scheme
from ktconv.targets.encoded.sections import compressed_tensors, mixed_precision
from ktconv.targets.encoded.stacking import NUMBERED
from ktconv.targets.encoded.target import RECIPE_TOML, Chosen, Options, Plan

RAWINT4_GROUP = 32  # kt-kernel 0.7.2 takes any group size, and computes only this one right


def quantization_config(plan: Plan, renamed: Iterable[str] = ()) -> dict[str, Any] | None:
    """Section of config.json from which engines read how modules are encoded; None where there is
    nothing to say. `renamed`: see `ignored_modules`."""
    others = (tensor for unit in plan.others for tensor in unit.tensors())
    patterns = plan.target.patterns((unit.layer, unit.experts) for unit in plan.layers)
    return quantization_section(plan.target.scheme, patterns, others, renamed)


def quantization_section(
    scheme: Scheme,
    patterns: Mapping[Scheme, Sequence[str]],
    others: Iterable[Stored],
    renamed: Iterable[str] = (),
) -> dict[str, Any] | None:
    """`quantization_config` for experts that `patterns` find, and the tensors `others`. `scheme` is
    that of the whole output."""
    ignored = ignored_modules(others, renamed)
    if scheme.row is MIXED:
        return mixed_precision(patterns, ignored)
    (pattern,) = patterns[scheme]
    return scheme.row.section(scheme, pattern, ignored)


def config_json(plan: Plan, renamed: Iterable[str] = ()) -> bytes:
    """The source's config.json, with our quantization_config in place of any other."""
    content = plan.checkpoint.config.document()
    section = quantization_config(plan, renamed)
    if section is not None:
        content["quantization_config"] = section
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def recipe_yaml(plan: Plan) -> bytes:
    """Recipe that llm-compressor was given. JSON is YAML, so values are written as JSON."""
    options, scheme = plan.target.options, plan.target.scheme
    group = {
        "targets": plan.target.patterns(_chosen(plan))[scheme],
        "weights": scheme.weight_arguments(),
    }
    if (activations := scheme.input_arguments()) is not None:
        group["input_activations"] = activations
    values: dict[str, Any] = {"config_groups": {"experts": group}, "ignore": []}
    name = "QuantizationModifier"
    if options.method == "gptq":
        name = "GPTQModifier"
        values["dampening_frac"] = options.dampening
    lines = ["default_stage:", "  default_modifiers:", f"    {name}:"]
    lines += [f"      {key}: {json.dumps(value)}" for key, value in values.items()]
    return ("\n".join(lines) + "\n").encode()


_TAGS = ("ktconv", "mixture-of-experts")


def card(plan: Plan, source: SourceCard, errors: ErrorSummary) -> str:
    """README.md of the output."""
    name, options, scheme = (
        source.name or model_name(plan.checkpoint.path),
        plan.target.options,
        plan.target.scheme,
    )
    counts = sorted({len(unit.experts) for unit in plan.layers})
    activations = {layer.index: layer.activation for layer in plan.moe_layers}
    chosen = any(unit.omitted for unit in plan.layers)
    what = _how(plan)
    others = "in bf16" if plan.checkpoint.is_gguf else "as it was"
    if options.experts_only:
        others = "left out"
    command = command_line(source.argument or name, options)
    if plan.checkpoint.side_directory not in (None, plan.checkpoint.path):
        command += " --config DIR"
    if plan.checkpoint.mapped is not None:
        command += " --map FILE.toml"
    changed = view_words(plan.checkpoint.adapters, plan.checkpoint.pruning is not None)
    command = " ".join([command, *changed])
    recorded = "contains a checksum of every tensor and the quantization error of every matrix."
    tool = " and llm-compressor" if options.method == "gptq" else ""
    note = "\nThe other experts of these layers are not in this checkpoint.\n" if chosen else ""
    compressed = scheme.row.section is compressed_tensors or scheme.row is MIXED
    methods = _methods(plan)
    tags = [_TAGS[0], *(["compressed-tensors"] if compressed else []), *_TAGS[1:], *methods]
    form = f"in the {'compressed-tensors' if compressed else scheme.layout.name} format"
    return f"""---
{header(source, _library(plan), tags)}
---

# {name}: experts in {" and ".join(methods)}

{name} with its routed experts in {" and ".join(methods)} ({what}), everything else {others}:
{format_size(plan.output_bytes)} {form}.

- MoE layers: {format_ranges([layer.index for layer in plan.moe_layers])}
- Experts per layer: {", ".join(map(str, counts))}
- Activation of the experts: {in_words(activations)}
{view_lines(plan)}- `ktconv.json` {recorded}
{errors_line(errors, plan.checkpoint.layers)}{note}
{_use(plan, chosen)}

Made with ktconv {__version__}{tool}:

    {command}
"""


def _how(plan: Plan) -> str:
    """The way from weights to codes, in words."""
    options, scheme = plan.target.options, plan.target.scheme
    how = "GPTQ, calibrated" if options.method == "gptq" else "rounded to nearest"
    how += ", scales searched" if options.scale == "search" else ""
    if plan.target.recipe is not None:
        return f"{how}, each matrix as {RECIPE_TOML} says"
    return f"{how}, {scheme.grouping}" if scheme.encodes else "decoded"


def _methods(plan: Plan) -> list[str]:
    """Their names, each once: of a recipe, in order of their first use."""
    if plan.target.recipe is None:
        return [plan.target.options.scheme]
    return list(dict.fromkeys(share.method.name for share in recipe_shares(plan)))


def _library(plan: Plan) -> str:
    """Name that the hub shows as a model's library."""
    if uneven_paragraph(plan.checkpoint.layers):
        return "ktconv"
    recipe, row = plan.target.recipe, plan.target.row
    if recipe is not None:  # transformers would read a mix wrongly
        alone = why_not("vllm", recipe, _chosen(plan)) is not None
        return "compressed-tensors" if alone else "vllm"
    if _biased(plan):
        return "ktconv"
    own = all(row.naming.keeps(layer) for layer in plan.moe_layers)
    if not own or row.naming is BLK or (row.kt_method and row.section is not compressed_tensors):
        return "ktransformers"
    readers = readers_of(row.name, plan.checkpoint, plan.target.options.expert_layout)
    able = (one.engine.lower() for one in (TRANSFORMERS, VLLM) if readers[one] is None)
    return next(able, "ktconv")


def _biased(plan: Plan) -> bool:
    return any(layer.biased for layer in plan.moe_layers)


def recipe_shares(plan: Plan) -> list[Share]:
    """Shares of a recipe's methods; empty without a recipe."""
    recipe = plan.target.recipe
    return [] if recipe is None else shares(recipe, _chosen(plan))


def _chosen(plan: Plan) -> list[Chosen]:
    return [(unit.layer, unit.experts) for unit in plan.layers]


def _use(plan: Plan, chosen: bool) -> str:
    """The paragraph about what loads the output."""
    if own := uneven_paragraph(plan.checkpoint.layers):
        return own
    if chosen:
        return (
            "No engine loads it by itself: sglang-kt chooses GPU experts by a placement strategy\n"
            "and would leave those that are absent uninitialised."
        )
    if plan.target.recipe is not None:
        return "\n".join(_of_mix(plan))
    return "\n".join([*_engines(plan), *_ktransformers(plan)])


def _of_mix(plan: Plan) -> list[str]:
    """Lines on what each method is used for, and what loads the mix."""
    recipe = plan.target.recipe
    assert recipe is not None
    loads = [name for name in ENGINES if why_not(name, recipe, _chosen(plan)) is None]
    lines = [f"- {share.method.words}: {share.words}" for share in recipe_shares(plan)]
    lines += ["", f"Loaded by: {', '.join(loads)}."]
    return [*lines, *(f"{line}." for line in engine_lines(recipe, _chosen(plan)))]


def _engines(plan: Plan) -> list[str]:
    """Engines that read the whole checkpoint by its config.json."""
    target = plan.target
    if _biased(plan):
        return ["Engines read experts with biases in one tensor of a layer, not one by one."]
    own = all(target.row.naming.keeps(layer) for layer in plan.moe_layers)
    if not own or target.options.experts_only:
        return ["Other engines than KTransformers do not know these names of experts."]
    if target.row.naming is BLK:
        return [
            "It is what KTransformers' converter makes of AWQ. No released loader of its reads it; "
            "ktconv's runtime does."
        ]
    if target.row.naming is V4:
        return ["Engines read it that know DeepSeek-V4's FP4 experts."]
    readers = readers_of(target.row.name, plan.checkpoint, target.options.expert_layout)
    able = [reader.title for reader, failure in readers.items() if failure is None]
    lines = [f"{listed(able)} {'read' if len(able) > 1 else 'reads'} it."] if able else []
    lines += [f"{reader.title} {failure}." for reader, failure in readers.items() if failure]
    if target.command == "quantize-gpu" and readers[SGLANG_KT] is None:
        lines.append(
            "With KTransformers it is what `--model` names, beside `--kt-weight-path` of a CPU\n"
            "conversion."
        )
    return lines


def _ktransformers(plan: Plan) -> list[str]:
    """Whether it can be the weights that KTransformers' CPU kernels compute."""
    target = plan.target
    if target.row.kt_method:
        if why := mismatch_paragraph(plan):
            return [why]
        return ["KTransformers loads the experts:", "", f"    {target.serving()} OUTPUT"]
    scheme = target.scheme
    named = all(".mlp.experts" in module for module in target.modules(plan.moe_layers))
    fits = scheme.row.kind == "int4" and scheme.group_size == RAWINT4_GROUP and named
    fits = fits and scheme.row.layout is PACK_QUANTIZED and target.stacking is None
    mismatch = mismatch_of(plan.moe_layers, "RAWINT4", model_types(plan.checkpoint))
    usable = "can" if fits and mismatch is None else "cannot"
    why = f":\n{mismatch.sentence}" if mismatch else ""
    return [f"It {usable} be the weights of `--kt-method RAWINT4` itself{why}."]


def command_line(name: str, options: Options) -> str:
    """The command that gives the same checkpoint again."""
    row = SCHEMES[options.scheme]
    words = [f"ktconv {row.command}", name, "OUTPUT"]
    if row.command == "quantize-gpu":
        words += [f"--algorithm {options.method}", f"--scheme {options.scheme}"]
        words += [f"--group-size {options.group_size}"] if len(row.groups) > 1 else []
    elif row is MIXED:
        words += [f"--recipe {RECIPE_TOML}"]
    else:
        words += [f"--method {options.scheme}"]
    words.append(f"--max-shard-size {options.max_shard_size}")
    words += [] if options.mtp else ["--no-mtp"]
    words += ["--experts FILE"] if options.experts else []
    words += ["--exclude-experts FILE --allow-partial"] if options.exclude_experts else []
    stacked = options.expert_layout != NUMBERED
    words += [f"--expert-layout {options.expert_layout}"] if stacked else []
    words += ["--experts-only"] if options.experts_only else []
    words += ["--requantize"] if options.requantize else []
    usual = "amax" if row.command == "quantize-gpu" else "search"
    rounds = row.is_int or row is MIXED
    words += [f"--scale {options.scale}"] if rounds and options.scale != usual else []
    words += ["--allow-activation-mismatch"] if options.allow_activation_mismatch else []
    if options.calibration is not None:
        used = options.calibration
        words += [f"--dataset {used.dataset}", f"--split {used.split}"]
        words += [f"--samples {used.samples}", f"--max-seq-len {used.max_seq_len}"]
        words += [f"--seed {used.seed}", f"--dampening {options.dampening}"]
    return " ".join(words)
