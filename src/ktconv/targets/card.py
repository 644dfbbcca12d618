"""The model card: a short README.md that describes the output."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktconv import __version__
from ktconv.conversion.plan import Plan as AnyPlan
from ktconv.conversion.records import ErrorSummary, zero_scales_in_words
from ktconv.source import MoELayer
from ktconv.source.activations import in_words
from ktconv.source.adapter.recorded import ENCODED_AGAIN, chosen
from ktconv.source.gguf.parts import model_stem
from ktconv.source.source_card import NOT_STRINGS, SourceCard
from ktconv.system.text import path_text, printable
from ktconv.system.units import counted, format_ranges, format_size
from ktconv.targets.consumers import uneven
from ktconv.targets.packed.target import BY_WEIGHTS, NO_KTRANSFORMERS, Options, Plan


def model_name(path: Path) -> str:
    """The name of a checkpoint as one printable line: its directory, what its GGUF files are called
    after, or org/name in the hub's cache."""
    for part in reversed(path.parts):
        if match := re.fullmatch(r"models--(.+?)--(.+)", part):
            return _one_line(f"{match[1]}/{match[2]}")
    name = path.resolve().name if path.is_dir() else model_stem(path.name)
    return _one_line(name)


def _one_line(name: str) -> str:
    return printable(" ".join(path_text(name).split()))


def command_line(
    name: str,
    options: Options,
    *,
    mapped: bool = False,
    tower: str | None = None,
    adapters: Sequence[str] = (),
    pruned: bool = False,
) -> str:
    """The command that reproduces the output."""
    words = ["ktconv quantize-cpu", shlex.quote(name), "OUTPUT", f"--method {options.method}"]
    words += [f"--numa {options.numa}", f"--scale {options.scale}"]
    if options.importance is not None:
        by_weights = options.importance == BY_WEIGHTS
        words.append(f"--importance {BY_WEIGHTS.kind if by_weights else 'FILE'}")
    if options.fold:
        words.append(f"--fold {options.fold}")
    if options.calibrate is not None:
        words.append(f"--calibrate {'DIR' if options.calibrate.kind == 'hessian' else 'FILE'}")
    if options.layout == "safetensors":
        words.append(f"--max-shard-size {options.max_shard_size}")
    else:
        words.append(f"--layout {options.layout}")
    if mapped:
        words.append("--map FILE.toml")
    if tower is not None:
        words.append(f"--tower {tower}")
    words += view_words(adapters, pruned)
    if options.exclude_experts:
        words.append("--exclude-experts FILE --allow-partial")
    words += [
        flag
        for flag, wanted in (
            ("--compat", options.compat),
            ("--requantize", options.requantize),
            ("--save-backward", options.save_backward),
            ("--allow-activation-mismatch", options.allow_activation_mismatch),
            ("--no-mtp", not options.mtp),
            ("--experts-only", options.experts_only),
        )
        if wanted
    ]
    return " ".join(words)


def view_words(adapters: Sequence[str], pruned: bool) -> list[str]:
    """The options that change a source: adapters, whose directories were elsewhere for whoever
    reads it, and fewer experts."""
    words = [
        f"--adapter {shlex.quote(str(one._replace(directory=Path(_one_line(one.directory.name)))))}"
        for one in chosen(adapters)
    ]
    return [*words, "--prune ktconv.json"] if pruned else words


def view_lines(plan: AnyPlan[Any]) -> str:
    """A line of the list for each adapter that was added to the weights, one where weights outside
    the experts were encoded again for them, and one where experts were dropped."""
    again = len(plan.checkpoint.encoded_again) if plan.others else 0
    lines = "".join(
        f"- LoRA in all weights: {_one_line(one.directory.name)}"
        + ("" if one.weight == 1 else f", times {one.weight:g}")
        + "\n"
        for one in chosen(plan.checkpoint.adapters)
    )
    if again:
        lines += (
            f"- Encoded in FP8 again, with LoRA: {counted(again, 'weight')} outside the experts, "
            f"which `ktconv.json` names ({ENCODED_AGAIN})\n"
        )
    if (pruning := plan.checkpoint.pruning) is not None:
        lines += f"- Kept are {pruning.in_words}; `ktconv.json` says which\n"
    return lines


def codes_in_words(options: Options) -> str:
    """The choice of scales and codes, in words."""
    if options.scale == "amax":
        return "amax: scales from the largest weight of each row, as KTransformers does"
    words = "search: scales with the smallest squared error of each row"
    if options.importance == BY_WEIGHTS:
        words += ", weighted by what the norm, up and gate make of the inputs"
    elif options.importance is not None:
        words += f", weighted by {_one_line(options.importance.file)}"
    if options.calibrate is not None:
        words = f"GPTQ on {_one_line(options.calibrate.text)}, scales by weighted search"
    return words + (f"; {options.fold} folded" if options.fold else "")


def header(source: SourceCard, library: str, tags: Sequence[str]) -> str:
    """The YAML of a card, in the words of the hub, without the lines of three dashes. Without a
    base model that the hub has, which it would refuse, the card has none."""
    relation = ("quantized",) if source.base_model else ()
    entries: list[tuple[str, Sequence[str]]] = [
        ("base_model", source.base_model),
        ("base_model_relation", relation),
        ("library_name", (library,)),
        ("pipeline_tag", source.pipeline_tag),
        ("license", source.license),
        ("license_name", source.license_name),
        ("license_link", source.license_link),
    ]
    lines = [line for key, values in entries for line in _entry(key, values)]
    return "\n".join(lines + _list("language", source.language) + _list("tags", tags))


def _entry(key: str, values: Sequence[str]) -> list[str]:
    if len(values) > 1:
        return _list(key, values)
    return [f"{key}: {yaml_string(value)}" for value in values]


def _list(key: str, values: Sequence[str]) -> list[str]:
    return [f"{key}:", *(f"- {yaml_string(value)}" for value in values)] if values else []


def yaml_string(text: str) -> str:
    """A YAML scalar that is this string: plain if possible, otherwise in double quotes, as in
    JSON."""
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", text, re.ASCII) and text.lower() not in NOT_STRINGS
    return text if plain else json.dumps(text, ensure_ascii=False)


def errors_line(errors: ErrorSummary, layers: Sequence[MoELayer]) -> str:
    """Lines of a list with the measured errors; empty if nothing was quantized."""
    lines = ""
    if errors.worst is not None and errors.mean is not None:
        lines += (
            f"- Relative RMS error of the weights: mean {errors.mean:.4f} over the tensors, worst "
            f"{errors.worst[1]:.4f} (`{errors.worst[0]}`)\n"
        )
    if errors.lost:
        lines += f"- Warning: {errors.lost_line(layers, '`')}\n"
    if errors.zero_scales:
        lines += f"- Zero scales in the source: {zero_scales_in_words(errors.zero_scales)}\n"
    return lines


def _use(plan: Plan) -> str:
    """The paragraph about what can load the output."""
    if own := uneven_paragraph(plan.checkpoint.layers):
        return own
    why = mismatch_paragraph(plan)
    if plan.target.options.exclude_experts:
        why = why and f"\n{why}"
        return (
            f"It runs in ktconv only. {NO_KTRANSFORMERS[0].upper()}{NO_KTRANSFORMERS[1:]}.\n"
            f"For KTransformers, convert without `--exclude-experts`.{why}"
        )
    if why:
        return why
    return (
        "KTransformers loads it. Serve it with these flags of sglang-kt. The number of thread\n"
        f"pools must be that of the files, {plan.target.options.numa}; otherwise it crashes or "
        f"computes wrong results.\n\n    {plan.target.serving()} OUTPUT"
    )


def uneven_paragraph(layers: Sequence[MoELayer]) -> str:
    """Sentence that no engine loads layers with different numbers of experts; empty otherwise."""
    sentence = uneven(layers)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def mismatch_paragraph(plan: AnyPlan[Any]) -> str:
    """Paragraph on why KTransformers computes something else from the output; empty where it does
    not."""
    if plan.target.mismatch is None:
        return ""
    sentences = plan.target.mismatch.sentence, plan.target.mismatch.consequence
    return " ".join(f"{one[0].upper()}{one[1:]}." for one in sentences)


def runtime(plan: Plan) -> tuple[str, str]:
    """The library that runs the output, and whose kernels those are."""
    own = plan.target.options.exclude_experts or plan.target.mismatch is not None
    if own or uneven(plan.checkpoint.layers):
        return "ktconv", "ktconv's"
    return "ktransformers", "KTransformers'"


def _expert_counts(plan: Plan) -> str:
    """Numbers of experts of the layers, and of those that were left out of them."""
    counts = sorted({len(unit.experts) for unit in plan.layers})
    left_out = sum(unit.omitted for unit in plan.layers)
    named = (
        f"; {counted(left_out, 'expert', 'are')} left out, `ktconv.json` names them"
        if left_out
        else ""
    )
    return ", ".join(map(str, counts)) + named


def _backward(plan: Plan) -> str:
    """About matrices of backward passes, if the output has them."""
    if not plan.target.backward:
        return ""
    return (
        "\n- Backward matrices, such as `ffn_up_bwd_exps`: transposed and quantized on their own, "
        "for fine-tuning with kt-kernel"
    )


def _tower(plan: Plan) -> str:
    tower = plan.checkpoint.tower
    return "" if tower is None else f" of the tower {tower}"


def model_card(plan: Plan, source: SourceCard, errors: ErrorSummary) -> str:
    """The card of a conversion."""
    name, options = source.name or model_name(plan.checkpoint.path), plan.target.options
    mapped, tower = plan.checkpoint.mapped is not None, plan.checkpoint.tower
    command = command_line(
        source.argument or name,
        options,
        mapped=mapped,
        tower=tower,
        adapters=plan.checkpoint.adapters,
        pruned=plan.checkpoint.pruning is not None,
    )
    if plan.checkpoint.side_directory not in (None, plan.checkpoint.path):
        command += " --config DIR"
    library, whose = runtime(plan)
    recorded = "has a checksum of every tensor and the quantization error of every matrix."
    return card(
        plan,
        header(source, library, tags(plan)),
        f"{name}: CPU experts in {plan.target.name}",
        f"The routed experts of {name}, quantized for {whose} CPU kernels",
        f"{recorded}\n\n{_use(plan)}",
        command,
        errors_line(errors, plan.checkpoint.layers),
    )


def tags(plan: Plan) -> list[str]:
    """Tags that users search for."""
    return ["ktconv", "mixture-of-experts", plan.target.options.method]


def card(
    plan: Plan, header: str, title: str, intro: str, recorded: str, command: str, errors: str = ""
) -> str:
    """README.md of packed experts. `header`: lines of its YAML; `recorded`: what the manifest has,
    and paragraphs after that; `errors`: a line of the list."""
    options = plan.target.options
    activations = {layer.index: layer.activation for layer in plan.moe_layers}
    content = "all tensors" if plan.others else "expert weights only"
    matrices = ",".join(plan.moe_layers[0].projections)
    where = (
        f"`blk.{{layer}}.ffn_{{{matrices}}}_exps.{{expert}}.numa.{{part}}.{{weight,scale}}`"
        if options.layout == "safetensors"
        else "`_layer_{layer}/_numa_{part}/*.kt`"
    )
    parts = counted(options.numa, "NUMA part")
    return f"""---
{header}
---

# {title}

{intro}:
{plan.target.name}, {parts}, {content}, {format_size(plan.output_bytes)}.

- MoE layers: {format_ranges([layer.index for layer in plan.moe_layers])}{_tower(plan)}
- Experts per layer: {_expert_counts(plan)}
- Activation of the experts: {in_words(activations)}
- Tensors: {where}{_backward(plan)}
- Codes by {codes_in_words(options)}
{errors}{view_lines(plan)}- `ktconv.json` {recorded}

Made with ktconv {__version__}:

    {command}
"""
