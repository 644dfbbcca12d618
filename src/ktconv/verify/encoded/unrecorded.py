"""Finds how packed integers without a manifest were quantized: by the rule that explains most of
some experts. `verify/packed/unrecorded.py` does the same for KTransformers' files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.quantize.encoded.stored import stored_matrix
from ktconv.source import ExpertMatrix
from ktconv.source.reading.matrices import MatrixReader, chunk_rows
from ktconv.source.reading.reader import SourceReader
from ktconv.system.arrays import U8
from ktconv.targets.encoded.kept import is_kept
from ktconv.targets.encoded.scheme import CHANNEL, SCHEMES, Scheme
from ktconv.targets.encoded.target import weight_dtype
from ktconv.verify.encoded.output import EncodedOutput, Module
from ktconv.verify.encoded.quantization import Group
from ktconv.verify.encoded.weights import PARTS, is_sound
from ktconv.verify.reading import read_tensor

_MATRICES = 9  # that are looked at; they decide together, as some can be damaged
_CODES, _SCALES = 0.9, 0.5  # shares that a rule explains; GPTQ moves far more codes


class Rule(Struct, frozen=True):
    """`scheme`: with the search or without; `kept`: codes and scales are the source's."""

    scheme: Scheme
    kept: bool = False

    @property
    def method(self) -> str:
        return "search" if self.scheme.search else "rtn"


class _Tally(Struct):
    """Numbers of codes and scales that a rule explains, and of all."""

    codes: int = 0
    scales: int = 0
    of_codes: int = 0
    of_scales: int = 0

    @property
    def explains(self) -> bool:
        return self.codes >= _CODES * self.of_codes and self.scales >= _SCALES * self.of_scales


def found_rule(output: EncodedOutput, group: Group, reader: SourceReader) -> Rule | None:
    """The rule of the experts of `group`, None where none explains them. Raises KtconvError for a
    source that cannot be read."""
    tallies: dict[Rule, _Tally] = {}
    for module, matrix in islice(_spread(output, group), _MATRICES):
        scheme = _scheme(group, module, matrix)
        if scheme is not None:
            for rule in _rules(scheme, matrix):
                _count(rule, module, matrix, reader, tallies.setdefault(rule, _Tally()))
    return max(
        (rule for rule, tally in tallies.items() if tally.explains),
        key=lambda rule: tallies[rule].codes + tallies[rule].scales,  # of several the first
        default=None,
    )


def can_be_told(output: EncodedOutput, group: Group) -> bool:
    """Whether some expert of `group` has scales that a rule can have made."""
    return any(_scheme(group, module, matrix) for module, matrix in _spread(output, group))


def _spread(output: EncodedOutput, group: Group) -> Iterator[tuple[Module, ExpertMatrix]]:
    """Sound matrices of experts with their source, far apart first."""
    sources = output.source_layers
    found = []
    for module in output.modules.values():
        layer = sources.get(module.layer) if module.layer is not None else None
        if module.where is None or layer is None or module.where.expert >= len(layer.experts):
            continue
        matrix = layer.experts[module.where.expert].get(module.where.proj)
        if matrix is None or output.quantization.group_of(module.name) is not group:
            continue
        if is_sound(module, group, matrix):
            found.append((module, matrix))
    step = max(1, len(found) // _MATRICES)
    for first in range(step):
        yield from found[first::step]


def _scheme(group: Group, module: Module, matrix: ExpertMatrix) -> Scheme | None:
    """The format with these scales; None for scales that ktconv does not write."""
    size = CHANNEL if group.group_size is None else group.group_size
    dtype, half = module.parts[PARTS[1]].dtype, weight_dtype(matrix) == "F16"
    for row in SCHEMES.values():
        if row.kind == f"int{group.bits}" and size in row.groups and row.layout is module.layout:
            scheme = Scheme(row.name, size)
            if dtype == ("F16" if scheme.is_half(half) else "BF16"):
                return scheme
    return None


def _rules(scheme: Scheme, matrix: ExpertMatrix) -> Iterator[Rule]:
    if is_kept(scheme, matrix, weight_dtype(matrix) == "F16"):
        yield Rule(scheme, kept=True)
    yield Rule(scheme)
    yield Rule(Scheme(scheme.name, scheme.group_size, search=True))


def _count(
    rule: Rule, module: Module, matrix: ExpertMatrix, reader: SourceReader, tally: _Tally
) -> None:
    """Compares the first rows of a matrix."""
    scheme, half = rule.scheme, weight_dtype(matrix) == "F16"
    rows = range(min(chunk_rows(matrix), matrix.rows))
    packed, scaled = (module.parts[part] for part in PARTS[:2])
    codes = read_tensor(packed, 0, len(rows) * packed.nbytes // matrix.rows)
    scales = read_tensor(scaled, 0, len(rows) * scaled.nbytes // matrix.rows).view(np.uint16)
    half_scales = scheme.is_half(half)
    source = MatrixReader(reader, matrix, round_to_bf16=not (rule.kept or half_scales))
    _, view = next(source.views())
    tally.of_codes += len(rows) * matrix.cols
    tally.of_scales += scales.size
    if rule.kept:
        grid = scales.view(np.uint8).reshape(len(rows), -1)
        stored = stored_matrix(scheme, codes.reshape(len(rows), -1), grid, matrix.cols, half)
        tally.codes += int(np.count_nonzero(native.decode(stored) == native.decode(view)))
        tally.scales += scales.size
        return
    wanted, by_rule = native.encode(scheme.encoding(half), view)
    tally.codes += len(rows) * matrix.cols - _different(codes, wanted, scheme.bits)
    tally.scales += int(np.count_nonzero(by_rule.reshape(-1) == scales.reshape(-1)))


def _different(one: U8, other: U8, bits: int) -> int:
    """Number of codes that differ."""
    apart = one.reshape(-1) ^ other.reshape(-1).view(np.uint8)
    if bits == 8:
        return int(np.count_nonzero(apart))
    return int(np.count_nonzero(apart & 15)) + int(np.count_nonzero(apart >> 4))


def rules_by_group(output: EncodedOutput, reader: SourceReader) -> Mapping[str, Rule | None]:
    """Rules by the names of groups that have experts whose rule can be told."""
    return {
        group.name: found_rule(output, group, reader)
        for group in output.quantization.groups
        if can_be_told(output, group)
    }
