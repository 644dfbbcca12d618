"""What verification of experts on GPUs adds to the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def mapping_lines(about: Mapping[str, Any], mark: str) -> Iterator[str]:
    """The slots, then which sizes are possible; what is not, with its reason."""
    yield f"mapping    {mark}: {about['slots']} tensors of {about['experts']} experts, one per slot"
    for kind in ("tensor", "expert"):
        rows: Sequence[Mapping[str, Any]] = about[f"{kind}_parallel"]
        possible = [str(row["size"]) for row in rows if row["possible"]]
        yield f"           {kind} parallel on {', '.join(possible) or 'no number of'} GPUs"
        for row in rows:
            if not row["possible"]:
                yield f"           not on {row['size']}: {row['reason']}"


def layers_line(about: Mapping[str, Any], mark: str) -> str:
    """Where no kernel of ours ran."""
    rows = about["layers"]
    worst = max(rows, key=lambda row: row["quantization_error"])
    return (
        f"layers     {mark}: {len(rows)} layers in float32, {about['tokens']} tokens of "
        f"{about['states_are']}: output off by {worst['quantization_error']:.4f} from the "
        f"source's at most (layer {worst['layer']}; worst expert "
        f"{worst['worst_expert']['expert']}: {worst['worst_expert']['error']:.4f})"
    )
