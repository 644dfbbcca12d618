"""docs/fine-tuning.md, as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import ktconv_done
from helpers.convert import convert
from helpers.paths import EXAMPLE, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.torch]

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ktconv.model import load_model, replace_experts  # noqa: E402


def test_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    convert(EXAMPLE, Path("OUTPUT"), method="int8")
    page = (ROOT / "docs/fine-tuning.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page.split("\n## ")[0], re.DOTALL)
    assert len(code) == 2
    torch.manual_seed(0)
    exec("\n".join(code), {})


def test_from_training_to_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of the section, one after the other, with the example model."""
    monkeypatch.chdir(tmp_path)
    Path("MODEL").symlink_to(EXAMPLE)
    Path("TEXT").symlink_to(EXAMPLE.parent / "corpus.txt")
    page = (ROOT / "docs/fine-tuning.md").read_text(encoding="utf-8")
    section = page.split("\n## From training to serving\n")[1].split("\n## ")[0]
    known: dict[str, Any] = {}
    torch.manual_seed(0)
    ran = 0
    for kind, block in re.findall(r"```(\w*)\n(.*?)```", section, re.DOTALL):
        if kind == "python":
            exec(block, known)
            ran += 1
            continue
        for line in block.splitlines():
            assert line.startswith("ktconv ")
            ktconv_done(*line.split()[1:])
            ran += 1
    assert ran == 5
    plain, _ = load_model(Path("MODEL"), "float32")
    with torch.no_grad():
        before = plain(input_ids=known["tokens"][None, :64]).logits
    trained = known["trained"]
    assert (trained - before).norm() > 0.05 * trained.norm()  # it has learned something
    packed, _ = load_model(Path("MODEL"), "float32", adapters=["ADAPTER"])
    replace_experts(packed, Path("OUTPUT"))
    with torch.no_grad():
        found = packed(input_ids=known["tokens"][None, :64]).logits
    assert (trained - found).norm() < 0.05 * trained.norm()  # rounding to INT8
