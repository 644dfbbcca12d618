"""The Triton kernels of vLLM, SGLang and sglang-kt for experts, called as these engines do.

Their kernels, the functions that launch them, the choice of tiles and the repacking of codes are
imported from the engine's package. Where its loader only copies, this copies.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.accuracy.engines.inputs import ROUNDERS, Routed, per_group, per_power, per_token
from benchmarks.accuracy.engines.modules import StandIn, engine_modules
from benchmarks.accuracy.engines.stored import TENSORS, Stored


class Engine(ABC):
    """Computes both products of a layer: `prepare` brings weights into the kernels' layout, then
    `multiply` is called for gate and up, and for down with the weights of the router."""

    roots: ClassVar[Sequence[str]]
    modules: ClassVar[Mapping[str, str]]  # imported from the sources, by their part here
    schemes: ClassVar[Sequence[str]]

    def __init__(self, parts: Mapping[str, ModuleType], device: str) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float16
        self.kernels, self.tiles, self.loader = parts["kernels"], parts["tiles"], parts["loader"]
        self.parts = parts

    @staticmethod
    @abstractmethod
    def given(hopper: bool) -> Mapping[str, Any]:
        """Names that the modules import from the rest of the engine, by module and name: those that
        tell the GPU and those that round activations."""

    @abstractmethod
    def prepare(self, stored: Stored) -> Stored:
        """The weights in the order that the kernels read."""

    def compute_type(self) -> Any:
        return getattr(self.kernels.tl, str(self.dtype).removeprefix("torch."))

    def config(self, stored: Stored, tokens: int, chosen: int) -> dict[str, Any]:
        """Tiles, as the engine chooses them for a GPU of which it has no tuned ones."""
        experts, inner = len(stored.w2), stored.w13.shape[1] // 2
        sizes = tokens, experts, inner, stored.w2.shape[1], chosen
        found: dict[str, Any] = self.tiles.get_default_config(*sizes, *self._dtype(stored))
        return found

    @abstractmethod
    def _dtype(self, stored: Stored) -> tuple[Any, ...]:
        """The arguments of the engine's choice of tiles behind the sizes."""

    @abstractmethod
    def multiply(self, call: Call, a: Tensor, out: Tensor, second: bool) -> None:
        """Writes the product of `a` and the weights of gate and up, or of down (`second`), into
        `out` [M, K, N]."""

    def activated(self, call: Call, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [M * K, I]: gate is the first half."""
        gate, up = gate_up.float().chunk(2, -1)
        return (nn.functional.silu(gate) * up).to(gate_up.dtype)


@dataclass(frozen=True)
class Call:
    """One pass through a layer: its weights, tiles, tokens and their places."""

    stored: Stored
    config: dict[str, Any]
    routed: Routed
    places: tuple[Tensor, Tensor, Tensor]

    def weight(self, second: bool) -> tuple[Tensor, Tensor]:
        of = self.stored
        return (of.w2, of.w2_scale) if second else (of.w13, of.w13_scale)

    def common(self, second: bool) -> dict[str, Any]:
        """The arguments that the launchers of all engines have."""
        places, owners, count = self.places
        return {
            "topk_weights": self.routed.weights,
            "sorted_token_ids": places,
            "expert_ids": owners,
            "num_tokens_post_padded": count,
            "mul_routed_weight": second,
            "top_k": 1 if second else self.routed.ids.shape[1],
            "config": dict(self.config),
            "block_shape": _block_shape(self.stored),
        }


def _block_shape(stored: Stored) -> list[int] | None:
    if stored.scheme == "FP8_BLOCK":
        return [128, 128]
    return [0, stored.group] if stored.scheme in ("W4A16", "W8A16") else None


def _kinds(scheme: str) -> dict[str, Any]:
    return {
        "use_fp8_w8a8": scheme.startswith("FP8"),
        "use_int8_w8a8": False,
        "use_int8_w8a16": scheme == "W8A16",
        "use_int4_w4a16": scheme == "W4A16",
        "per_channel_quant": scheme == "FP8_DYNAMIC",
    }


class _Cuda(StandIn):
    """vLLM's platform."""

    simple_compile_backend = "eager"

    def __init__(self, hopper: bool) -> None:
        self._hopper = hopper

    def is_cuda(self) -> bool:
        return True

    def is_device_capability(self, capability: int) -> bool:
        return self._hopper and capability == 90


_VLLM = "vllm.model_executor.layers.fused_moe"


class Vllm(Engine):
    roots = ("vllm", "compressed_tensors")
    modules: ClassVar[Mapping[str, str]] = {
        "kernels": f"{_VLLM}.fused_moe",
        "tiles": f"{_VLLM}.fused_moe",
        "rules": f"{_VLLM}.utils",
        "loader": f"{_VLLM}.oracle.int_wna16",
        "mxfp8": f"{_VLLM}.experts.mxfp8_native_moe",
    }
    schemes = ("W4A16", "W8A16", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8")

    @staticmethod
    def given(hopper: bool) -> Mapping[str, Any]:
        triton = importlib.import_module("triton")
        return {
            "vllm.triton_utils.triton": triton,
            "vllm.triton_utils.tl": importlib.import_module("triton.language"),
            "vllm.platforms.current_platform": _Cuda(hopper),
            "vllm.utils.math_utils.next_power_of_2": triton.next_power_of_2,
            "vllm.envs.VLLM_TRITON_USE_TD": None,
        }

    def prepare(self, stored: Stored) -> Stored:
        if stored.scheme not in ("W4A16", "W8A16"):
            return stored
        triton = self.loader.WNA16MoEBackend.TRITON
        found = self.loader.convert_to_wna16_moe_kernel_format(
            triton, None, None, None, stored.w13, stored.w2, stored.w13_scale, stored.w2_scale
        )
        return stored.changed(dict(zip(TENSORS, found, strict=False)))

    def config(self, stored: Stored, tokens: int, chosen: int) -> dict[str, Any]:
        if stored.scheme == "MXFP8":
            return {"BLOCK_SIZE_M": 64}
        return super().config(stored, tokens, chosen)

    def _dtype(self, stored: Stored) -> tuple[Any, ...]:
        names = {"W4A16": "int4_w4a16", "W8A16": "int8_w8a16"}
        return names.get(stored.scheme, "fp8_w8a8"), _block_shape(stored)

    def multiply(self, call: Call, a: Tensor, out: Tensor, second: bool) -> None:
        scheme, (b, b_scale) = call.stored.scheme, call.weight(second)
        if scheme == "MXFP8":
            out.copy_(self._mxfp8(call, a, b, b_scale, second).view(out.shape))
            return
        kinds, common = _kinds(scheme), call.common(second)
        given = {"A": a, "B": b, "C": out, "B_scale": b_scale, **common}
        given["compute_type"] = self.compute_type()
        if scheme in ("W4A16", "W8A16"):
            both = {name: kinds[name] for name in ("use_int8_w8a16", "use_int4_w4a16")}
            self.kernels.invoke_fused_moe_wna16_triton_kernel(B_zp=None, **given, **both)
            return
        given["A"], a_scale = ROUNDERS[scheme](a)
        self.kernels.invoke_fused_moe_triton_kernel(A_scale=a_scale, **given, **kinds)

    def _mxfp8(self, call: Call, a: Tensor, b: Tensor, b_scale: Tensor, second: bool) -> Tensor:
        codes, scale = per_power(a)
        ids, weights = call.routed.ids, call.routed.weights
        chosen = ids.shape[1]
        found: Tensor = self.parts["mxfp8"]._grouped_gemm_mxfp8(
            codes, scale, b, b_scale, *call.places, ids.numel(), chosen, 64, torch.float32,
            1 if second else chosen, weights.flatten() if second else None,
        )  # fmt: skip
        return found


_SGLANG = "sglang.srt.layers"


class Sglang(Engine):
    roots = ("sglang", "compressed_tensors")
    modules: ClassVar[Mapping[str, str]] = {
        "kernels": "sglang.kernels.ops.moe.fused_moe_triton_kernels",
        "tiles": f"{_SGLANG}.moe.moe_runner.triton_utils.fused_moe_triton_config",
        "loader": f"{_SGLANG}.quantization.compressed_tensors.schemes.compressed_tensors_wNa16_moe",
    }
    schemes = ("W4A16", "W8A16", "FP8_DYNAMIC", "FP8_BLOCK")

    @staticmethod
    def given(hopper: bool) -> Mapping[str, Any]:
        known: dict[str, Any] = {
            "sglang.srt.utils.is_cuda": lambda: True,
            "sglang.srt.utils.is_sm90_supported": lambda: hopper,
            f"{_SGLANG}.moe.utils.get_moe_padding_size": lambda _: 0,
        }
        for module in ("sglang.kernels.ops.quantization", f"{_SGLANG}.quantization"):
            known[f"{module}.fp8_kernel.scaled_fp8_quant"] = lambda x, *_, **__: per_token(x)
            known[f"{module}.fp8_kernel.sglang_per_token_group_quant_fp8"] = per_group
        return known

    def prepare(self, stored: Stored) -> Stored:
        """Codes and scales are loaded transposed, [E, K / 8, N] and [E, K / group, N], then brought
        into the kernel's order. The engine has no loader of W8A16 for this kernel: it is loaded
        in the same way."""
        if stored.scheme not in ("W4A16", "W8A16"):
            return stored
        layer = nn.Module()
        names = ("w13_weight_packed", "w2_weight_packed", "w13_weight_scale", "w2_weight_scale")
        of = dict(zip(TENSORS, names, strict=True))
        for name in TENSORS:
            transposed = getattr(stored, name).transpose(1, 2).contiguous()
            layer.register_parameter(of[name], nn.Parameter(transposed, requires_grad=False))
        scheme = self.loader.CompressedTensorsWNA16TritonMoE
        scheme.process_weights_after_loading(SimpleNamespace(), layer)
        return stored.changed({name: getattr(layer, of[name]).data for name in TENSORS})

    def _dtype(self, stored: Stored) -> tuple[Any, ...]:
        names = {"W4A16": "int4_w4a16", "W8A16": "int8_w8a16"}
        return names.get(stored.scheme, "fp8_w8a8"), False, _block_shape(stored)

    def multiply(self, call: Call, a: Tensor, out: Tensor, second: bool) -> None:
        b, b_scale = call.weight(second)
        self.kernels.invoke_fused_moe_kernel(
            A=a, B=b, bias=None, C=out, A_scale=None, B_scale=b_scale, B_zp=None,
            topk_ids=call.routed.ids, compute_type=self.compute_type(),
            **call.common(second), **_kinds(call.stored.scheme),
        )  # fmt: skip

    def activated(self, call: Call, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self.kernels.act_and_mul_triton(gate_up, out, call.config, topk_ids=call.routed.ids)
        return out


class SglangKt(Sglang):
    modules: ClassVar[Mapping[str, str]] = {
        **Sglang.modules,
        "kernels": f"{_SGLANG}.moe.fused_moe_triton.fused_moe_triton_kernels",
        "tiles": f"{_SGLANG}.moe.fused_moe_triton.fused_moe_triton_config",
    }


ENGINES: Mapping[str, type[Engine]] = {"vllm": Vllm, "sglang": Sglang, "sglang-kt": SglangKt}


def import_engine(name: str, sources: Path, device: str, hopper: bool) -> Engine:
    kind = ENGINES[name]
    wanted = list(dict.fromkeys(kind.modules.values()))
    with engine_modules(sources, kind.roots, wanted, kind.given(hopper)) as found:
        return kind({part: found[module] for part, module in kind.modules.items()}, device)
