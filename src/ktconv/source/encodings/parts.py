"""Endings that encodings give to the names of tensors: weight, weight_scale, qweight and so on."""

from __future__ import annotations

from ktconv.source.encodings import ENCODINGS
from ktconv.source.encodings.base import BIAS, WEIGHT

PARTS = frozenset(
    name
    for encoding in ENCODINGS
    for name in (
        encoding.primary,
        *(name for companion in encoding.companions for name in companion.names),
        *encoding.ignored,
        BIAS,
    )
)
_IGNORED = frozenset(name for encoding in ENCODINGS for name in encoding.ignored)
UNDERSCORED = {  # gate_up_proj_scale_inv, gate_up_proj_blocks
    f"_{part.removeprefix(f'{WEIGHT}_')}": part
    for part in PARTS
    if part.startswith(f"{WEIGHT}_") or part in ("blocks", "scales", BIAS) or part in _IGNORED
}


def part_of(name: str) -> tuple[str, str]:
    """A tensor's name without the ending that its encoding gives it, and the part that it is; the
    whole name for one without a known ending."""
    base, _, last = name.rpartition(".")
    if base and last in PARTS:
        return base, last
    for end, part in UNDERSCORED.items():
        if name.endswith(end) and part != BIAS:
            return name.removesuffix(end), part
    return name, WEIGHT
