"""docs/fine-tuning.md, as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.convert import convert
from helpers.paths import EXAMPLE, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.torch]

torch = pytest.importorskip("torch")


def test_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    convert(EXAMPLE, Path("OUTPUT"), method="int8")
    page = (ROOT / "docs/fine-tuning.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page.split("\n## ")[0], re.DOTALL)
    assert len(code) == 2
    torch.manual_seed(0)
    exec("\n".join(code), {})
