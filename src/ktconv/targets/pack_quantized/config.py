"""config.json, recipe.yaml and README.md of a compressed-tensors checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ktconv import __version__
from ktconv.checkpoint.activations import in_words
from ktconv.checkpoint.source_card import SourceCard
from ktconv.conversion.records import ErrorSummary
from ktconv.system.units import format_ranges, format_size
from ktconv.targets.card import errors_line, header, model_name
from ktconv.targets.consumers import mismatch_of, model_types
from ktconv.targets.pack_quantized.ignored import Stored, ignored_modules
from ktconv.targets.pack_quantized.names import LINEAR, module_name, target_pattern
from ktconv.targets.pack_quantized.scheme import CHANNEL, Scheme
from ktconv.targets.pack_quantized.target import FORMAT, Options, Plan

RAWINT4_GROUP = 32  # kt-kernel 0.7.2 takes any group size, and computes only this one right


def quantization_config(plan: Plan, renamed: Iterable[str] = ()) -> dict[str, Any]:
    """Which modules are packed, and how, for inference engines. `renamed`: see `ignored_modules`.

    The class Linear is a target because sglang-kt 0.7.2 and vLLM before 0.11 look up the scheme of
    experts by that name alone; so every other linear layer must be on the list `ignore`.
    """
    others = (tensor for unit in plan.others for tensor in unit.tensors())
    target = target_pattern(plan.moe_layers)
    return quantization_section(plan.target.scheme, target, others, renamed)


def quantization_section(
    scheme: Scheme, target: str, others: Iterable[Stored], renamed: Iterable[str] = ()
) -> dict[str, Any]:
    """`quantization_config` for experts that `target` finds, beside the tensors `others`."""
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "experts": {
                "targets": [target, LINEAR],
                "weights": scheme.weight_arguments(),
                "input_activations": None,
                "output_activations": None,
                "format": FORMAT,
            }
        },
        "ignore": ignored_modules(others, renamed),
        "transform_config": {},
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def config_json(plan: Plan, renamed: Iterable[str] = ()) -> bytes:
    """The source's config.json, with our quantization_config in place of any other."""
    content = _without_quantization(dict(plan.checkpoint.whole_config or plan.checkpoint.config))
    content["quantization_config"] = quantization_config(plan, renamed)
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _without_quantization(section: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_quantization(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if key not in ("quantization_config", "compression_config")
    }


def recipe_yaml(plan: Plan) -> bytes:
    """What llm-compressor was asked for. JSON is YAML, so values are written as JSON."""
    options = plan.target.options
    group = {
        "targets": [target_pattern(plan.moe_layers)],
        "weights": plan.target.scheme.weight_arguments(),
    }
    values: dict[str, Any] = {"config_groups": {"experts": group}, "ignore": []}
    name = "QuantizationModifier"
    if options.method == "gptq":
        name = "GPTQModifier"
        values["dampening_frac"] = options.dampening
    lines = ["default_stage:", "  default_modifiers:", f"    {name}:"]
    lines += [f"      {key}: {json.dumps(value)}" for key, value in values.items()]
    return ("\n".join(lines) + "\n").encode()


_TAGS = ("ktconv", "compressed-tensors", "mixture-of-experts")


def card(plan: Plan, source: SourceCard, errors: ErrorSummary) -> str:
    """README.md of the output."""
    name, options = source.name or model_name(plan.checkpoint.path), plan.target.options
    counts = sorted({len(unit.experts) for unit in plan.layers})
    activations = {layer.index: layer.activation for layer in plan.moe_layers}
    chosen = any(unit.omitted for unit in plan.layers)
    size = options.group_size
    groups = "one scale per row" if size == CHANNEL else f"groups of {size}"
    how = "GPTQ, calibrated" if options.method == "gptq" else "rounded to nearest"
    others = "in bf16" if plan.checkpoint.is_gguf else "as it was"
    command = command_line(source.argument or name, options)
    if plan.checkpoint.side_directory not in (None, plan.checkpoint.path):
        command += " --config DIR"
    if plan.checkpoint.mapped is not None:
        command += " --map FILE.toml"
    tool = " and llm-compressor" if options.method == "gptq" else ""
    note = "\nThe other experts of these layers are not in this checkpoint.\n" if chosen else ""
    return f"""---
{header(source, "transformers", [*_TAGS, options.scheme])}
---

# {name}: experts in {options.scheme}

{name} with its routed experts in {options.scheme} ({how}, {groups}), everything else {others}:
{format_size(plan.output_bytes)} in the compressed-tensors format.

- MoE layers: {format_ranges([layer.index for layer in plan.moe_layers])}
- Experts per layer: {", ".join(map(str, counts))}
- Activation of the experts: {in_words(activations)}
- `ktconv.json` contains a checksum of every tensor and the quantization error of every matrix.
{errors_line(errors)}{note}
{_use(plan, chosen)}

Made with ktconv {__version__}{tool}:

    {command}
"""


def _use(plan: Plan, chosen: bool) -> str:
    """The paragraph about what loads the output."""
    if chosen:
        return (
            "No engine loads it by itself: sglang-kt chooses GPU experts by a placement strategy\n"
            "and would leave those that are absent uninitialised."
        )
    text = (
        "vLLM, SGLang and transformers read it; with KTransformers it is what `--model` names,\n"
        "beside `--kt-weight-path` of a CPU conversion."
    )
    named = all(".mlp.experts" in module_name(layer, 0, "up") for layer in plan.moe_layers)
    fits = (
        plan.target.options.scheme == "W4A16"
        and plan.target.options.group_size == RAWINT4_GROUP
        and named
    )
    mismatch = mismatch_of(plan.moe_layers, "RAWINT4", model_types(plan.checkpoint))
    usable = "can" if fits and mismatch is None else "cannot"
    why = f":\n{mismatch.sentence}" if mismatch else ""
    return f"{text} It {usable} be the weights of `--kt-method RAWINT4` itself{why}."


def command_line(name: str, options: Options) -> str:
    """The command that gives the same checkpoint again."""
    words = ["ktconv quantize-gpu", name, "OUTPUT", f"--method {options.method}"]
    words += [f"--scheme {options.scheme}", f"--group-size {options.group_size}"]
    words.append(f"--max-shard-size {options.max_shard_size}")
    words += [] if options.mtp else ["--no-mtp"]
    words += ["--experts FILE"] if options.experts else []
    if options.calibration is not None:
        used = options.calibration
        words += [f"--dataset {used.dataset}", f"--split {used.split}"]
        words += [f"--samples {used.samples}", f"--max-seq-len {used.max_seq_len}"]
        words += [f"--seed {used.seed}", f"--dampening {options.dampening}"]
    return " ".join(words)
