"""`quantization_config` of config.json, as the library that defines a format reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ktconv import __version__
from ktconv.targets.encoded.names import LINEAR

if TYPE_CHECKING:
    from ktconv.targets.encoded.scheme import Scheme

# Lists of modules that are not encoded, by library.
IGNORED_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers")
# The scheme, the pattern by which compressed-tensors finds the experts, and the modules that are
# not encoded, sorted. None: config.json says nothing about quantization.
Section = Callable[["Scheme", str, Sequence[str]], "dict[str, Any] | None"]


def no_section(scheme: Scheme, target: str, plain: Sequence[str]) -> None:
    """No section: for plain weights, and for files that no library reads by their config."""


def compressed_tensors(scheme: Scheme, target: str, plain: Sequence[str]) -> dict[str, Any]:
    """The class Linear is a target because sglang-kt 0.7.2 and vLLM before 0.11 look up the scheme
    of experts by that name alone; so every other linear layer must be on the list `ignore`."""
    groups = {"experts": _group(scheme, [target, LINEAR])}
    return _compressed(scheme.layout.name, groups, list(plain))


def mixed_precision(
    targets: Mapping[Scheme, Sequence[str]], plain: Sequence[str]
) -> dict[str, Any] | None:
    """compressed-tensors' with a group for each scheme; `targets`: patterns that find its modules.
    What is bf16 is on the list `ignore`. The class Linear is no target: engines that look up
    experts by it alone would read those of one scheme by another."""
    groups = {
        f"{scheme.name} {scheme.grouping}": _group(scheme, list(patterns))
        for scheme, patterns in targets.items()
        if scheme.encodes
    }
    if not groups:
        return None
    bf16 = [one for scheme, some in targets.items() if not scheme.encodes for one in some]
    return _compressed("mixed-precision", groups, [*plain, *bf16])


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    return {
        "targets": targets,
        "weights": scheme.weight_arguments(),
        "input_activations": scheme.input_arguments(),
        "output_activations": None,
        "format": scheme.layout.name,
    }


def _compressed(form: str, groups: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "transform_config": {},
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def fine_grained_fp8(scheme: Scheme, target: str, plain: Sequence[str]) -> dict[str, Any]:
    """DeepSeek-V3's, which transformers calls fine-grained FP8."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(plain),
    }


def deepseek_v4(scheme: Scheme, target: str, plain: Sequence[str]) -> dict[str, Any]:
    """DeepSeek-V4's: experts are FP4 by `expert_dtype`."""
    about = fine_grained_fp8(scheme, target, plain)
    return {**about, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}


def mxfp8(scheme: Scheme, target: str, plain: Sequence[str]) -> dict[str, Any]:
    """MiniMax-M3's."""
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [1, 32],
        "ignored_layers": list(plain),
    }


def modelopt_nvfp4(scheme: Scheme, target: str, plain: Sequence[str]) -> dict[str, Any]:
    """ModelOpt's, for weights alone."""
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": scheme.group_size}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {
            "group_0": {"weights": weights, "input_activations": None, "targets": [LINEAR]}
        },
        "ignore": list(plain),
        "producer": {"name": "ktconv", "version": __version__},
    }


def gptq(scheme: Scheme, target: str, plain: Sequence[str]) -> dict[str, Any]:
    """GPTQModel's. `dynamic` excludes what is no routed expert: "-:" and a pattern of names."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": scheme.group_size,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "lm_head": False,
        "dynamic": {r"-:(?!.*\.experts\b).*": {}},
        "meta": {"quantizer": [f"ktconv:{__version__}"]},
    }


def ignored_in(section: Mapping[str, Any]) -> Iterable[str]:
    """The modules that a section says are not encoded."""
    for key in IGNORED_KEYS:
        yield from section.get(key) or ()
