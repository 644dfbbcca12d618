"""Facts about kernels under the names of kt_kernel, as programs ask for them."""

from __future__ import annotations

from collections.abc import Mapping

from ktconv.native.levels import isa_available

_BEST = isa_available()[-1]
# kt_kernel's names of CPU variants and INT8 kernels; ours compute on every CPU.
_VARIANTS = {
    "amx": ("amx", "amx-int8"),
    "avx512": ("avx512_bf16", "avx512-vnni"),
}
CPU_VARIANT, INT8_KERNEL = _VARIANTS.get(_BEST, ("avx2", "avx512-vnni"))
INT8_LAYOUT = "kt-int8-n32-k64-vnni-v1"  # of files: that of AMXINT8, on any CPU

FACTS: Mapping[str, str] = {
    "__cpu_variant__": CPU_VARIANT,
    "__int8_kernel__": INT8_KERNEL,
    "__int8_weight_layout__": INT8_LAYOUT,
    "__fp8_kernel__": "avx512-fp8-decode-bf16",
    "__fp8_weight_layout__": "block-e4m3-128x128",
    "__rawint4_kernel__": "amx-int4-kgroup-g32",
    "__rawint4_weight_layout__": "compressed-tensors-rawint4-g32-v1",
}
