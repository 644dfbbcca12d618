"""Arguments of a call, NumPy arrays or torch tensors, as addresses for the C library.

Arrays that are contiguous and of a dtype that the kernels read are used where they lie; others are
copied. What is wrong with one is a UsageError with its name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats.decode import bf16_to_f32
from ktconv.system.arrays import Array

FLOATS = ("bf16", "fp16", "fp32")
INTEGERS = ("int32", "int64")


class Operand(NamedTuple):
    """Memory of a call; `owner` keeps it alive, and is an array of this dtype."""

    address: int
    dtype: str
    owner: Any


class Kind(Protocol):
    """A kind of arrays, NumPy's or torch's tensors, as calls need to know it."""

    names: Mapping[Any, str]  # dtype -> its name in messages and here; others cannot be converted
    dtypes: Mapping[str, Any]

    def refusal(self, array: Any) -> str | None:
        """Reason why the CPU cannot read it at all; None: it can."""

    def is_plain(self, array: Any) -> bool:
        """Whether its elements lie one behind the other."""

    def is_ready(self, array: Any) -> bool:
        """Not refused, and plain."""

    def is_writable(self, array: Any) -> bool: ...

    def address(self, array: Any) -> int: ...

    def copy(self, array: Any, dtype: str) -> Any:
        """A contiguous one of that dtype."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any: ...

    def empty_like(self, array: Any) -> Any:
        """A new array with the shape and dtype of a plain one."""

    def numpy(self, array: Any) -> Array:
        """Values as NumPy has them, bf16 as float32. TypeError for a layout without strides."""

    def of_numpy(self, array: Array) -> Any:
        """One of this kind with the memory of `array`."""

    def stored(self, name: str, array: Any) -> Array:
        """A view of its memory, bf16 as uint16. UsageError where the CPU cannot read it."""


class NumPyArrays:
    """uint16 are the bits of bf16, which NumPy does not have."""

    names: Mapping[Any, str] = {
        np.dtype(np.uint16): "bf16",
        np.dtype(np.float16): "fp16",
        np.dtype(np.float32): "fp32",
        np.dtype(np.int8): "int8",
        np.dtype(np.uint8): "uint8",
        np.dtype(np.int16): "int16",
        np.dtype(np.int32): "int32",
        np.dtype(np.int64): "int64",
        np.dtype(np.bool_): "bool",
    }
    dtypes: Mapping[str, Any] = {name: dtype for dtype, name in names.items()}

    def refusal(self, array: Array) -> str | None:
        return None

    def is_plain(self, array: Array) -> bool:
        return array.flags.carray or (array.flags.c_contiguous and array.flags.aligned)

    is_ready = is_plain

    def is_writable(self, array: Array) -> bool:
        return array.flags.writeable

    address = staticmethod(native.address_of)

    def copy(self, array: Array, dtype: str) -> Array:
        if array.dtype == np.uint16 and dtype == "fp32":
            array = bf16_to_f32(array)
        return np.array(array, self.dtypes[dtype], order="C")

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.empty(shape, self.dtypes[dtype])

    def empty_like(self, array: Array) -> Array:
        return np.empty(array.shape, array.dtype)

    def numpy(self, array: Array) -> Array:
        return bf16_to_f32(array) if array.dtype == np.uint16 else array

    def of_numpy(self, array: Array) -> Array:
        return array

    def stored(self, name: str, array: Array) -> Array:
        return array


class TorchTensors:
    """Made once torch is imported."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._strided = torch, torch.strided
        self.names: Mapping[Any, str] = {
            torch.bfloat16: "bf16",
            torch.float16: "fp16",
            torch.float32: "fp32",
            torch.int8: "int8",
            torch.uint8: "uint8",
            torch.int16: "int16",
            torch.int32: "int32",
            torch.int64: "int64",
            torch.bool: "bool",
        }
        self.dtypes: Mapping[str, Any] = {name: dtype for dtype, name in self.names.items()}

    def refusal(self, array: Any) -> str | None:
        if not array.is_cpu:
            return f"is on {array.device}: copy it to the CPU"
        if array.requires_grad and self._torch.is_grad_enabled():
            return (
                "needs a gradient, which calls of a layer do not have: use "
                "ktconv.train.LoRAExperts, or call under torch.no_grad()"
            )
        return None if array.layout is self._torch.strided else f"has the layout {array.layout}"

    def is_plain(self, array: Any) -> bool:
        return bool(array.is_contiguous()) and not array.is_neg()

    def is_ready(self, array: Any) -> bool:
        simple = array.layout is self._strided and array.is_cpu and not array.requires_grad
        return simple and self.is_plain(array)

    def is_writable(self, array: Any) -> bool:
        return True

    def address(self, array: Any) -> int:
        found: int = array.data_ptr()
        return found

    def copy(self, array: Any, dtype: str) -> Any:
        return self.empty(array.shape, dtype).copy_(array.detach())

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        # Without a device it would be on the caller's default one.
        return self._torch.empty(shape, dtype=self.dtypes[dtype], device="cpu")

    def empty_like(self, array: Any) -> Any:
        return self._torch.empty_like(array)

    def numpy(self, array: Any) -> Array:
        values = array.detach().cpu().resolve_neg()
        found: Array = (values.float() if self.names.get(array.dtype) == "bf16" else values).numpy()
        return found

    def of_numpy(self, array: Array) -> Any:
        return self._torch.from_numpy(array)

    def stored(self, name: str, array: Any) -> Array:
        own = array.detach()
        if (reason := self.refusal(own)) is not None:
            raise UsageError(f"{name} {reason}")
        own = own.resolve_neg()
        if own.dtype == self._torch.bfloat16:
            bits: Array = own.view(self._torch.int16).numpy()
            return bits.view(np.uint16)
        values: Array = own.numpy()
        return values


_NUMPY = NumPyArrays()
_torch_tensors = cache(TorchTensors)
_KINDS: dict[type, Kind] = {np.ndarray: _NUMPY}  # of types that were seen


def kind_of(name: str, array: Any) -> Kind:
    """UsageError for anything but NumPy arrays and torch tensors."""
    return _KINDS.get(type(array)) or _new_kind(name, array)


def _new_kind(name: str, array: Any) -> Kind:
    torch = sys.modules.get("torch")  # without it nothing can be a tensor
    if isinstance(array, np.ndarray):
        found: Kind = _NUMPY
    elif torch is not None and isinstance(array, torch.Tensor):
        found = _torch_tensors(torch)
    else:
        kind = type(array).__name__
        raise UsageError(f"{name} is neither a NumPy array nor a torch tensor, but a {kind}")
    return _KINDS.setdefault(type(array), found)


def shape_of(name: str, array: Any) -> tuple[int, ...]:
    """UsageError for what has none."""
    found = getattr(array, "shape", None)
    if found is None:
        kind_of(name, array)  # which says what it is
    return tuple(found or ())


def operand(
    name: str,
    array: Any,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
    convert: tuple[str, ...] = (),
) -> Operand:
    """`array`, which must have this shape and one of `dtypes`; one of `convert` is copied to the
    last of `dtypes`."""
    kind = kind_of(name, array)
    dtype = kind.names.get(array.dtype)
    if dtype not in dtypes or array.shape != shape or not kind.is_ready(array):
        dtype = _checked(kind, name, array, shape, dtypes + convert)
        if dtype not in dtypes or not kind.is_plain(array):
            dtype = dtype if dtype in dtypes else dtypes[-1]
            array = kind.copy(array, dtype)
    address = _address(kind, name, array)
    if address & 7 and address % array.itemsize:  # which a tensor over bytes may be
        array = kind.copy(array, dtype)
        address = kind.address(array)
    return Operand(address, dtype, array)


def result(name: str, array: Any, shape: tuple[int, ...]) -> Operand:
    """`array` to write to, where it lies."""
    kind = kind_of(name, array)
    dtype = kind.names.get(array.dtype)
    if dtype not in FLOATS or array.shape != shape or not kind.is_ready(array):
        dtype = _checked(kind, name, array, shape, FLOATS)
    if not (kind.is_plain(array) and kind.is_writable(array)):
        raise UsageError(f"{name} must be contiguous, and not read-only", "give a new array")
    address = _address(kind, name, array)
    if address % array.itemsize:
        raise UsageError(f"{name} is not aligned to its {dtype}", "give a new array")
    return Operand(address, dtype, array)


def of_numpy(array: Array) -> Operand:
    """A contiguous array of a known dtype."""
    return Operand(native.address_of(array), _NUMPY.names[array.dtype], array)


def new_result(like: Operand) -> Operand:
    """A new array of the same kind, shape and dtype."""
    kind = kind_of("x", like.owner)
    array = kind.empty_like(like.owner)
    return Operand(kind.address(array), like.dtype, array)


def _address(kind: Kind, name: str, array: Any) -> int:
    try:
        found = kind.address(array)
    except RuntimeError as error:  # of tensors that are only traced, as those of torch.vmap
        raise UsageError(f"{name} has no memory: {error}") from None
    if not found and array.nbytes:
        raise UsageError(f"{name} has a shape but no memory", "its storage was freed")
    return found


def _checked(
    kind: Kind, name: str, array: Any, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> str:
    """The name of its dtype."""
    dtype = kind.names.get(array.dtype)
    if dtype not in dtypes or tuple(array.shape) != shape:
        raise UsageError(
            f"{name} must be {_either(dtypes)} of shape {list(shape)}, got "
            f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"
        )
    if (reason := kind.refusal(array)) is not None:
        raise UsageError(f"{name} {reason}")
    return dtype


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} or {names[-1]}"
