"""The part of ggml's C interface that one MoE layer needs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ktconv.bench.peers.base import PeerError

TO_FLOAT = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
EXTRA_BUFFER_TYPES = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)

F32, I32 = 0, 26
TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "bf16": 30, "mxfp4": 39}  # enum ggml_type


class InitParams(Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class TypeTraits(Structure):
    _fields_ = (
        ("type_name", c_char_p),
        ("block", c_int64),
        ("interleaved", c_int64),
        ("size", c_size_t),
        ("quantized", c_bool),
        ("to_float", TO_FLOAT),
    )


_P = c_void_p  # contexts, tensors, graphs, buffers, backends
_BASE = {
    "ggml_init": (_P, InitParams),
    "ggml_free": (None, _P),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_get_type_traits": (POINTER(TypeTraits), c_int),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_get_data": (_P, _P),
    "ggml_nbytes": (c_size_t, _P),
    "ggml_new_tensor_2d": (_P, _P, c_int, c_int64, c_int64),
    "ggml_new_tensor_3d": (_P, _P, c_int, c_int64, c_int64, c_int64),
    "ggml_view_2d": (_P, _P, _P, c_int64, c_int64, c_size_t, c_size_t),
    "ggml_mul_mat_id": (_P, _P, _P, _P, _P),
    "ggml_swiglu_split": (_P, _P, _P, _P),
    "ggml_swiglu_oai": (_P, _P, _P, _P, c_float, c_float),
    "ggml_mul": (_P, _P, _P, _P),
    "ggml_add": (_P, _P, _P, _P),
    "ggml_set_output": (None, _P),
    "ggml_new_graph": (_P, _P),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_quantize_chunk": (c_size_t, c_int, _P, _P, c_int64, c_int64, c_int64, _P),
    "ggml_gallocr_new": (_P, _P),
    "ggml_gallocr_free": (None, _P),
    "ggml_gallocr_alloc_graph": (c_bool, _P, _P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "ggml_backend_buffer_free": (None, _P),
    "ggml_backend_buft_name": (c_char_p, _P),
    "ggml_backend_cpu_buffer_type": (_P,),
    "ggml_backend_tensor_set": (None, _P, _P, c_size_t, c_size_t),
    "ggml_backend_supports_op": (c_bool, _P, _P),
    "ggml_backend_graph_compute": (c_int, _P, _P),
    "ggml_backend_free": (None, _P),
    "ggml_backend_reg_dev_get": (_P, _P, c_size_t),
    "ggml_backend_reg_get_proc_address": (_P, _P, c_char_p),
}
_CPU = {
    "ggml_backend_cpu_init": (_P,),
    "ggml_backend_cpu_set_n_threads": (None, _P, c_int),
    "ggml_backend_cpu_reg": (_P,),
}


class Ggml:
    """Functions by their C names without the ggml_ in front."""

    def __init__(self) -> None:
        found = find_spec("llama_cpp")
        if found is None or found.origin is None:
            raise PeerError("llama-cpp-python is not installed")
        folder = Path(found.origin).parent / "lib"
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, table in (("base", _BASE), ("cpu", _CPU)):
            path = folder / f"libggml-{name}.so"
            try:
                library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                for function, (result, *arguments) in table.items():
                    entry = getattr(library, function)
                    entry.restype, entry.argtypes = result, arguments
                    self._functions[function.removeprefix("ggml_")] = entry
            except (OSError, AttributeError) as error:
                raise PeerError(f"ggml cannot be loaded: {error}") from None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(name) from None

    def context(self, tensors: int, graphs: int = 0) -> int:
        """A context for descriptions of tensors; their data is in buffers."""
        room = tensors * self.tensor_overhead() + graphs * self.graph_overhead()
        return int(self.init(InitParams(room, None, True)))

    def buffer_types(self) -> list[int]:
        """Buffer types of the CPU: layouts made for its kernels first, the plain one last."""
        registry = self.backend_cpu_reg()
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        found: list[int] = []
        if address:
            extra = EXTRA_BUFFER_TYPES(address)(self.backend_reg_dev_get(registry, 0))
            while extra and (buffer_type := extra[len(found)]):
                found.append(buffer_type)
        return [*found, self.backend_cpu_buffer_type()]
