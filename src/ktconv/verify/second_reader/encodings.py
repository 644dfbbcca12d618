"""The encodings: which tensors make a weight, and what their numbers mean. A row per encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv.source import TensorRef
from ktconv.system.arrays import F32, I64, Array
from ktconv.verify.second_reader import numbers
from ktconv.verify.second_reader.numbers import GGML_TYPES, ITEMS, block_numbers, block_size

Read = Callable[[TensorRef, int, int], bytes]  # so many bytes from an offset on of a tensor

SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
PRIMARY = ("weight", "weight_packed", "weight_blocks", "qweight")
_USUAL_BLOCK = (128, 128)
# How GPTQ (checkpoint_format) and AutoRound (packing_format) call zero points stored as they are.
_TRUE_ZEROS = ("gptq_v2", "auto_round", "auto_round:gptqmodel")


class Place(Struct, frozen=True):
    """Place of a weight [rows, cols] in a stored matrix of `outs` x `ins` numbers: its row n is
    output first + step * n. `experts`: the leading axis of the tensors, which the stored matrix is
    number `expert` of; None: they have none. `transposed`: stored [in, out]."""

    rows: int
    cols: int
    outs: int
    ins: int
    first: int = 0
    step: int = 1
    experts: int | None = None
    expert: int = 0
    transposed: bool = False


class Source(Struct, frozen=True):
    """The tensors of one weight, by what follows its name, and its place in them."""

    parts: Mapping[str, TensorRef]
    place: Place
    quantization: Mapping[str, Any]  # quantization_config of config.json
    read: Read

    def shape(self, part: str) -> tuple[int, ...]:
        """Shape of a tensor, without the axis of experts."""
        shape, experts = self.parts[part].shape, self.place.experts
        if experts is not None and shape[:1] == (experts,):
            return shape[1:]
        return shape

    def items(self, part: str) -> Array:
        """A whole tensor; of one with all experts, this expert's part."""
        tensor, shape = self.parts[part], self.shape(part)
        nbytes = tensor.nbytes // int(np.prod(tensor.shape[: len(tensor.shape) - len(shape)]))
        start = self.place.expert * nbytes if nbytes < tensor.nbytes else 0
        data = self.read(tensor, start, nbytes)
        return np.frombuffer(data, ITEMS[tensor.dtype]).reshape(shape)

    def rectangle(self, part: str, height: range, width: range) -> Array:
        """Items of some rows and columns of a stored matrix; of blocks of ggml, their bytes."""
        tensor, rows = self.parts[part], self.shape(part)[0]
        kind = np.dtype(ITEMS.get(tensor.dtype, "u1"))
        stacked = self.place.experts or 1 if self.shape(part) != tensor.shape else 1
        row_bytes = tensor.nbytes // (stacked * rows)
        first = self.place.expert * rows if stacked > 1 else 0
        start, nbytes = width.start * kind.itemsize, len(width) * kind.itemsize
        if nbytes == row_bytes:  # whole rows lie one behind the other
            data = self.read(tensor, (first + height.start) * row_bytes, len(height) * row_bytes)
        else:
            data = b"".join(
                self.read(tensor, (first + row) * row_bytes + start, nbytes) for row in height
            )
        return np.frombuffer(data, kind).reshape(len(height), len(width))


class Units(Struct, frozen=True):
    """Storage of a weight's codes: `items` items have the numbers of `outs` outputs by `ins`
    inputs. `decode`: [..., items] to [..., outs * ins]."""

    decode: Callable[[Array], Array]
    outs: int = 1
    ins: int = 1
    items: int = 1


class Weight(Struct, frozen=True):
    """(code - zero) * scale. Element (n, k) has the scale and the zero point of
    [row_of[n], col_of[k]]; `scale` None: the codes are the values."""

    source: Source
    primary: str
    units: Units
    scale: F32 | None = None  # [a, b]
    zero: F32 | None = None  # [a, b]; None: 0
    row_of: I64 | None = None
    col_of: I64 | None = None
    middle: int | None = None  # of integers: the code that is 0 where zero points are symmetric

    def values(self, rows: range, cols: range) -> F32:
        """Float32 values of some rows and columns, by one rounding of each product."""
        codes = self._codes(rows, cols)
        if self.scale is None or self.row_of is None or self.col_of is None:
            return codes
        at = np.ix_(self.row_of[rows.start : rows.stop], self.col_of[cols.start : cols.stop])
        with np.errstate(all="ignore"):
            values: F32 = (codes if self.zero is None else codes - self.zero[at]) * self.scale[at]
        return values

    def _codes(self, rows: range, cols: range) -> F32:
        place, unit = self.source.place, self.units
        low, high = place.first + place.step * rows.start, place.first + place.step * rows[-1] + 1
        out = range(low // unit.outs, -(-high // unit.outs))
        first, last = cols.start // unit.ins, -(-cols.stop // unit.ins)
        inputs = range(first * unit.items, last * unit.items)
        if place.transposed:
            items = self.source.rectangle(self.primary, inputs, out)
            items = items.reshape(last - first, unit.items, len(out)).transpose(2, 0, 1)
        else:
            items = self.source.rectangle(self.primary, out, inputs)
            items = items.reshape(len(out), last - first, unit.items)
        codes = np.asarray(unit.decode(np.ascontiguousarray(items)), np.float32)
        codes = codes.reshape(len(out), last - first, unit.outs, unit.ins).swapaxes(1, 2)
        codes = codes.reshape(len(out) * unit.outs, -1)
        row, col = low - out.start * unit.outs, cols.start - first * unit.ins
        found: F32 = codes[row : row + high - low : place.step, col : col + len(cols)]
        return found


# ---- grids of scales and zero points -------------------------------------------------------


def _grid(values: F32, place: Place, blocks: tuple[int, int]) -> F32 | None:
    """[out blocks, in blocks] of what is stored for blocks of that many outputs and inputs, in
    the orientation of the weight, with or without axes of length 1; None: it is not that."""
    shape = -(-place.outs // blocks[0]), -(-place.ins // blocks[1])
    stored = shape[::-1] if place.transposed else shape
    if [size for size in values.shape if size > 1] != [size for size in stored if size > 1]:
        return None
    grid = values.reshape(stored)
    return grid.T if place.transposed else grid


def _scaled(
    source: Source,
    primary: str,
    units: Units,
    scale: F32,
    blocks: tuple[int, int],
    zero: F32 | None = None,
    middle: int | None = None,
    groups: I64 | None = None,
) -> Weight | None:
    place = source.place
    grid = _grid(scale, place, blocks)
    if grid is None:
        return None
    if zero is not None:
        zero = np.broadcast_to(zero, grid.shape)
    row_of = (place.first + place.step * np.arange(place.rows)) // blocks[0]
    col_of = np.arange(place.cols) // blocks[1] if groups is None else groups
    return Weight(source, primary, units, grid, zero, row_of, col_of, middle)


def _by_shape(source: Source, count: int) -> tuple[int, int] | None:
    """Outputs and inputs that share one of `count` scales: of the tensor, of gate or of up in a
    tensor of both, or of rows in groups."""
    place = source.place
    if count == 1:
        return place.outs, place.ins
    if count == 2 and place.step == 1 and place.outs == 2 * place.rows:
        return place.rows, place.ins
    groups, rest = divmod(count, place.outs)
    width = 0 if rest or not groups else _width(source, groups)
    return (1, width) if width else None


def _width(source: Source, groups: int) -> int:
    """Neighbouring inputs that share a scale; 0 if nothing tells. A declared number of them counts
    if that many groups end with the last input."""
    ins = source.place.ins
    fitting = {
        size
        for size in _declared_widths(source.quantization)
        if (groups - 1) * size < ins <= groups * size
    }
    if groups > 1 and len(fitting) == 1:
        return fitting.pop()
    return ins // groups if ins % groups == 0 else 0


def _declared_widths(quantization: Mapping[str, Any]) -> Iterator[int]:
    for key, value in quantization.items():
        if key == "group_size" and isinstance(value, int) and value > 0:
            yield value
        about_inputs = "activation" in key or key.split("_")[0] in ("input", "output")
        if isinstance(value, Mapping) and not about_inputs:
            yield from _declared_widths(value)


# ---- floating point --------------------------------------------------------------------


def _plain(source: Source) -> Weight | None:
    """Floats, and in GGUF files blocks of ggml: there either may have a factor."""
    dtype = source.parts["weight"].dtype
    units = Units(lambda items: numbers.floats(items, dtype))
    if dtype in GGML_TYPES:
        count, nbytes = block_size(dtype)
        units = Units(partial(block_numbers, dtype), ins=count, items=nbytes)
    if "scale" not in source.parts:
        return Weight(source, "weight", units)
    place, factor = source.place, source.items("scale").astype(np.float32)
    return _scaled(source, "weight", units, factor, (place.outs, place.ins))


def _fp8(source: Source) -> Weight | None:
    name = next(name for name in SCALES if name in source.parts)
    scale = numbers.floats(source.items(name), source.parts[name].dtype)
    units = Units(lambda items: numbers.E4M3[items])
    rows, cols = _declared_block(source.quantization) or _USUAL_BLOCK
    found = _scaled(source, "weight", units, scale, (rows, cols))
    shared = _by_shape(source, scale.size)
    if found is None and shared is not None:
        found = _scaled(source, "weight", units, scale, shared)
    return found


def _declared_block(quantization: Mapping[str, Any]) -> Any:
    """weight_block_size, or block_structure of compressed-tensors' groups, if they have one."""
    groups = quantization.get("config_groups")
    found = [group.get("weights") for group in groups.values()] if groups else []
    blocks = [one["block_structure"] for one in found if one and one.get("block_structure")]
    same = blocks and all(one == blocks[0] for one in blocks)
    return quantization.get("weight_block_size") or (blocks[0] if same else None)


_FP4 = Units(lambda items: numbers.E2M1[numbers.pairs(items)], ins=2)


_QUARTERS = Units(lambda items: numbers.QUARTERS[numbers.pairs(items)], ins=2)  # MXINT4
_FP6 = Units(lambda items: numbers.E2M3[numbers.fours(items)], ins=4, items=3)


def _mxfp4(source: Source) -> Weight | None:
    name = next(name for name in (*SCALES, "weight_scales") if name in source.parts)
    scale = numbers.powers_of_two(source.items(name))
    extra = source.quantization.get("extra_config") or {}
    kinds = (one.get("data_type") for one in (source.quantization, *extra.values()))
    primary, integers = primary_of(source.parts), any("mx_int" in str(kind) for kind in kinds)
    units = _QUARTERS if integers and primary == "weight_packed" else _FP4
    return _scaled(source, primary, units, scale, (1, 32))


def _mxfp6(source: Source) -> Weight | None:
    if 4 * source.shape("weight_packed")[-1] != 3 * source.place.ins:
        return None
    scale = numbers.powers_of_two(source.items("weight_scale"))
    return _scaled(source, "weight_packed", _FP6, scale, (1, 32))


def _nvfp4(source: Source) -> Weight | None:
    primary, parts = primary_of(source.parts), source.parts
    scale = numbers.floats(source.items("weight_scale"), "F8_E4M3")
    second = "weight_global_scale" if "weight_global_scale" in parts else "weight_scale_2"
    of_expert = source.items(second).reshape(-1)  # of gate and up where they have two
    outer = of_expert[1 if of_expert.size == 2 and source.place.first else 0]
    with np.errstate(all="ignore"):
        scale = scale / outer if "weight_global_scale" in parts else scale * outer
    return _scaled(source, primary, _FP4, scale, (1, 16))


def _nvfp4_e5m3(source: Source) -> Weight | None:
    codes = source.items("weight_scale")
    packing = [str(source.quantization.get(key)) for key in ("format", "packing_format")]
    if source.shape("weight_scale")[-1] != -(-source.place.ins // 16) or not any(
        one.partition("nvfp4")[2].replace("-", "_").startswith("_e5m3") for one in packing
    ):
        return None
    return _scaled(source, "weight_packed", _FP4, numbers.eighths_of_powers(codes), (1, 16))


# ---- integers --------------------------------------------------------------------------


def _float_grid(source: Source, part: str) -> tuple[F32, tuple[int, int]] | None:
    scale = numbers.floats(source.items(part), source.parts[part].dtype)
    blocks = _by_shape(source, scale.size)
    return None if blocks is None else (scale, blocks)


def _groups(source: Source, part: str) -> I64 | None:
    """The group of every input; None: they are in order."""
    if part not in source.parts:
        return None
    index = source.items(part).view("<i4").reshape(-1).astype(np.int64)
    return None if (index == -1).all() else index


def _bits(source: Source) -> int | None:
    """Bits of a number, by the words that a row takes."""
    words, ins = source.shape("weight_packed")[-1], source.place.ins
    return next((bits for bits in range(2, 9) if words == -(-ins * bits // 32)), None)


def _stream_units(bits: int) -> Units:
    """Whole words with whole numbers."""
    words = {1: 1, 2: 1, 4: 1, 8: 1}.get(bits) or bits // int(np.gcd(bits, 32))
    count = 32 * words // bits
    return Units(lambda items: numbers.stream(items, bits)[..., :count], ins=count, items=words)


def _packed(source: Source) -> Weight | None:
    found, bits = _float_grid(source, "weight_scale"), _bits(source)
    if found is None or bits is None:
        return None
    scale, blocks = found
    middle = 1 << bits - 1
    zero = np.array([[middle]], np.float32)
    if "weight_zero_point" in source.parts:
        words = source.items("weight_zero_point")  # [words of outputs, groups]
        heights = -(-source.place.outs // blocks[0])
        zero = numbers.stream(words.T, bits).T[:heights]
    groups = _groups(source, "weight_g_idx")
    units = _stream_units(bits)
    return _scaled(source, "weight_packed", units, scale, blocks, zero, middle, groups)


def _int8(source: Source) -> Weight | None:
    found = _float_grid(source, "weight_scale")
    if found is None:
        return None
    scale, blocks = found
    zero = None
    if "weight_zero_point" in source.parts:
        zero = _grid(numbers.signed(source.items("weight_zero_point")), source.place, blocks)
    elif "weight_offset" in source.parts:  # msModelSlim
        zero = _grid(source.items("weight_offset"), source.place, blocks)
    return _scaled(source, "weight", Units(numbers.signed), scale, blocks, zero, 0)


def _signed_int4(source: Source) -> Weight | None:
    """AngelSlim."""
    found = _float_grid(source, "weight_scale")
    units = Units(lambda items: numbers.SIGNED_4[numbers.pairs(items)], ins=2)
    return None if found is None else _scaled(source, "weight_packed", units, *found, None, 0)


def _packing(source: Source) -> str:
    keys = ["checkpoint_format", "packing_format", "version"]
    if source.quantization.get("quant_method") in ("gptq", "awq"):
        keys.append("format")
    found = (source.quantization.get(key) for key in keys)
    return next((one.lower() for one in found if isinstance(one, str)), "gptq")


def _gptq(source: Source) -> Weight | None:
    place, words = source.place, source.shape("qweight")[0]
    bits, rest = divmod(32 * words, place.ins)
    found = _float_grid(source, "scales")
    if found is None or rest or not 2 <= bits <= 8:
        return None
    # [outputs, groups]; the last word has more where eight, say, do not divide the outputs
    zero = numbers.stream(source.items("qzeros"), bits).T[: place.outs]
    if _packing(source) not in _TRUE_ZEROS:
        zero = (zero + 1) % (1 << bits)
    middle, groups = 1 << bits - 1, _groups(source, "g_idx")
    return _scaled(source, "qweight", _stream_units(bits), *found, zero, middle, groups)


def _awq(source: Source) -> Weight | None:
    found = _float_grid(source, "scales")
    if found is None:
        return None
    zero = numbers.awq(source.items("qzeros")).T
    return _scaled(source, "qweight", Units(numbers.awq, outs=8), *found, zero, 8)


def _reordered(source: Source) -> Weight | None:
    """AWQ as KTransformers exports it: codes [out, in], scales [groups * outputs]."""
    place, scale = source.place, source.items("scale")
    groups = scale.size // place.outs
    zero = numbers.stream(source.items("qzeros"), 4)  # [groups, outputs]
    fits = groups * place.outs == scale.size and zero.shape == (groups, place.outs)
    if not fits or not _width(source, groups):
        return None
    values = numbers.floats(scale, source.parts["scale"].dtype).reshape(groups, place.outs)
    blocks = 1, _width(source, groups)
    return _scaled(source, "weight", _stream_units(4), values.T, blocks, zero.T, 8)


# ---- which one a weight has ---------------------------------------------------------------


class Row(Struct, frozen=True):
    """An encoding: the name and dtypes of its primary tensor, the tensors that tell it from others,
    and a function that gives the weight, or None where it is none."""

    primary: str
    dtypes: frozenset[str]
    beside: Callable[[Mapping[str, TensorRef]], bool]
    weight: Callable[[Source], Weight | None]


def _has(*names: str) -> Callable[[Mapping[str, TensorRef]], bool]:
    """One of these tensors is there."""
    return lambda parts: any(name in parts for name in names)


def _powers(parts: Mapping[str, TensorRef]) -> bool:
    return any(parts[name].dtype in ("U8", "F8_E8M0") for name in SCALES if name in parts)


def _only_a_factor(parts: Mapping[str, TensorRef]) -> bool:
    """No scales; `scale` is none of them in GGUF files."""
    gguf = parts["weight"].file.suffix == ".gguf"
    return not any(name in parts for name in SCALES if not (gguf and name == "scale"))


def _not(beside: Callable[[Mapping[str, TensorRef]], bool]) -> Callable[..., bool]:
    return lambda parts: not beside(parts)


def _of(*dtypes: str) -> frozenset[str]:
    return frozenset(dtypes)


ROWS: tuple[Row, ...] = (
    Row("weight", _of("BF16", "F16", "F32", *GGML_TYPES), _only_a_factor, _plain),
    Row("weight", _of("F8_E4M3"), _has(*SCALES), _fp8),
    Row("weight", _of("I8", "U8", "F4"), _powers, _mxfp4),
    Row("weight", _of("U8"), _has("weight_scale_2"), _nvfp4),
    Row("weight", _of("I8"), _not(_powers), _int8),
    Row("weight", _of("I32"), _has("qzeros"), _reordered),
    Row("weight_packed", _of("U8"), _powers, _mxfp6),
    Row("weight_packed", _of("U8"), _powers, _nvfp4_e5m3),
    Row("weight_packed", _of("U8"), _powers, _mxfp4),
    Row("weight_blocks", _of("U8"), _has("weight_scales"), _mxfp4),
    Row("weight_packed", _of("U8"), _has("weight_global_scale"), _nvfp4),
    Row("weight_packed", _of("I32"), _has("weight_scale"), _packed),
    Row("weight_packed", _of("I8"), _has("weight_scale"), _signed_int4),
)


def primary_of(parts: Mapping[str, TensorRef]) -> str:
    """The name of the tensor with the codes; "" if there is none."""
    return next((name for name in PRIMARY if name in parts), "")


def transposed(parts: Mapping[str, TensorRef]) -> bool:
    """Whether weights with such tensors are always stored [in, out]."""
    return "qweight" in parts


def weight_of(source: Source) -> Weight | None:
    """The weight of these tensors; None: no row has such names, dtypes and shapes."""
    place, parts = source.place, source.parts
    if "qweight" in parts:
        # AWQ packs eight outputs into a word, GPTQ inputs.
        return (_awq if source.shape("qweight")[-1] * 8 == place.outs else _gptq)(source)
    for row in ROWS:
        tensor = parts.get(row.primary)
        if tensor is not None and tensor.dtype in row.dtypes and row.beside(parts):
            found = row.weight(source)
            if found is not None:
                return found
    return None
