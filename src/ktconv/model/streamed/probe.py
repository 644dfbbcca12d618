"""Finds out whether a layer of a model depends on more than the output of the layer before it."""

from __future__ import annotations

import zlib
from collections import UserDict
from collections.abc import Iterator, Mapping, Set
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_LEAVES = (str, bytes, int, float, complex, type(None), type, FunctionType, ModuleType)
_CONTAINERS = (list, tuple, set, frozenset)
# Of any module, and without tensors of its own.
_OF_MODULES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_NO_TENSORS = ("logging", "torch")  # where objects are from that are not looked into


class WriteOnly(dict[Any, Any]):
    """A dict for layers that are given an empty one: they may leave data in it for others, as long
    as none reads it. Reading raises `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def _read(self, *_: Any) -> Any:
        raise self._error

    __getitem__ = __contains__ = __iter__ = __reversed__ = __len__ = __or__ = _read
    __ror__ = get = keys = values = items = pop = popitem = setdefault = copy = _read


def is_empty_dict(value: Any) -> bool:
    """Whether it is for what layers tell each other; Gemma 4 has one without using it."""
    return isinstance(value, (dict, UserDict)) and not value


# ---- what a value is -------------------------------------------------------------------


def kind_of(value: Any) -> Any:
    """Types of an output and of all in it, and dtypes of tensors."""
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    if isinstance(value, Mapping):
        return type(value), tuple((key, kind_of(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(kind_of, value))
    return type(value)


def fingerprint(value: Any) -> Any:
    """A value that is equal for equal content, also of another run: of tensors a checksum."""
    return _fingerprint(value, {})


def _fingerprint(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), _checksum(value)
    if isinstance(value, _LEAVES):
        return value
    if id(value) in seen:
        return "seen before"
    seen[id(value)] = value
    if isinstance(value, nn.Module):
        return id(value)
    parts = [(name, _fingerprint(one, seen)) for name, one in _parts(value)]
    return type(value), parts


def _checksum(tensor: Tensor) -> int | None:
    if tensor.device.type == "meta":
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def randomized(value: Any, seed: int) -> Any:
    """An output with other numbers. Integers are indices: they are moved, and stay valid."""
    if isinstance(value, Tensor) and value.numel():
        generator = torch.Generator().manual_seed(seed)
        shift = int(torch.randint(value.numel(), (1,), generator=generator))
        moved = value.roll(shift)
        if value.dtype == torch.bool:
            return moved ^ bool(seed % 2)
        if value.is_floating_point() or value.is_complex():
            return moved * float(torch.randn(1, generator=generator))
        return moved
    if isinstance(value, dict):
        return {key: randomized(one, seed) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([randomized(one, seed) for one in value])
    return value


# ---- what a layer changes --------------------------------------------------------------


class Watch:
    """Sees whether tensors are left, or changed, in `values` or in anything that these have, but
    for the modules `apart`."""

    def __init__(self, values: Mapping[str, Any], apart: Set[nn.Module]) -> None:
        self._values, self._apart = values, apart
        self.begin()

    def begin(self) -> None:
        """Take the present state as the one that must not change."""
        self._before = self._tensors()

    def changed(self) -> str | None:
        """Place of a tensor that is new, or another."""
        for path, (tensor, content) in self._tensors().items():
            before = self._before.get(path)
            if before is None or before[0] is not tensor or before[1] != content:
                return path
        return None

    def _tensors(self) -> dict[str, tuple[Tensor, int | None]]:
        seen: dict[int, Any] = {id(one): one for one in self._apart}
        found = {}
        for name, value in self._values.items():
            for path, tensor in _reached(value, name, seen):
                own = isinstance(tensor, nn.Parameter)
                found[path] = tensor, None if own else _checksum(tensor)
        return found


def _reached(value: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif not isinstance(value, (*_LEAVES, WriteOnly)) and id(value) not in seen:
        seen[id(value)] = value  # so that no other gets its id
        for name, one in _parts(value):
            inner = name if path == "" or name.startswith("[") else f".{name}"
            yield from _reached(one, f"{path}{inner}", seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Parts of an object, by names."""
    if isinstance(value, nn.Module):
        for name, one in vars(value).items():
            if name in ("_parameters", "_buffers", "_modules"):
                yield from one.items()
            elif name not in _OF_MODULES:
                yield name, one
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, _CONTAINERS):
        yield from ((f"[{number}]", one) for number, one in enumerate(value))
    elif type(value).__module__.partition(".")[0] not in _NO_TENSORS:
        yield from getattr(value, "__dict__", {}).items()
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield name, getattr(value, name)
