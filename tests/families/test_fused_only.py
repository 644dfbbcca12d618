"""Families whose experts transformers reads one by one, in the release that the table names."""

from __future__ import annotations

from typing import Any

import pytest

from ktconv.families import table
from ktconv.targets.encoded.readers import TRANSFORMERS

_METHOD = "compressed-tensors"


def one_by_one(mapping: Any, model_type: str) -> bool:
    """Whether numbered experts become its stacked ones while they are loaded."""
    changes = mapping.get_checkpoint_conversion_mapping(model_type) or []
    patterns = [p for change in changes for p in getattr(change, "source_patterns", ())]
    return any("experts.*." in pattern for pattern in patterns)


def taken_apart(base: Any, model_type: str) -> bool:
    """Whether the experts of quantized models become modules of their own (Llama 4)."""
    return any(
        kind.lower().startswith(model_type.removesuffix("_text"))
        and _METHOD in [method.value for method in about["quantization_methods"]]
        for kind, about in base.MODULES_TO_PATCH_FOR_QUANTIZATION.items()
    )


def test_the_table_says_what_transformers_does() -> None:
    version = pytest.importorskip("transformers").__version__
    if not version.startswith(f"{TRANSFORMERS.version}."):
        pytest.skip(f"the table is of transformers {TRANSFORMERS.version}, not {version}")
    from transformers import conversion_mapping
    from transformers.quantizers import base

    wrong = []
    for row in table.FAMILIES.rows:
        for kind in row.types:
            known = any(
                one_by_one(conversion_mapping, name) or taken_apart(base, name)
                for name in (kind, f"{kind}_text")
            )
            # In rows with classes of the same architecture, but without one of their own
            if known == row.fused_only and kind not in (
                "kimi_k2",
                "deepseek_vl_v2",
                "deepseek_v41",
            ):
                wrong.append((kind, known))
    assert not wrong
