"""The commands of docs/pruning.md and of `ktconv prune --help`, run as they are printed."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import ktconv, ktconv_done
from helpers.paths import EVAL, EXAMPLE, ROOT

pytestmark = pytest.mark.slow

KEEP = "6"  # of the example's 8 experts, in place of the page's 96


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With MODEL and prose.txt, as the page names them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copytree(EXAMPLE, folder / "MODEL")
    shutil.copy(EVAL, folder / "prose.txt")
    monkeypatch.chdir(folder)
    return folder


def test_the_page(folder: Path, torch: Any) -> None:
    """Its commands, one after the other, on the example: with fewer windows, and as many experts as
    it has."""
    text = (ROOT / "docs/pruning.md").read_text(encoding="utf-8")
    block = next(one for one in re.findall(r"```\n(.*?)```", text, re.DOTALL) if "prune" in one)
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert [words[0] for words in commands] == ["stats", "prune", "prune", "quantize-cpu", "verify"]
    for words in commands:
        ours = [KEEP if word == "96" else word for word in words]
        if "--keep" in ours:
            assert ours[ours.index("--keep") + 1] == KEEP
        more = {"quantize-cpu": ["--numa=1"], "verify": ["--windows=1"]}
        ktconv_done(*ours, *more.get(ours[0], []))
    assert {"scores.json", "pruned", "kept.json", "pruned-int4"} <= {
        path.name for path in folder.iterdir()
    }
    assert ktconv("verify", "pruned", "--source", "MODEL").exit_code == 0


def test_the_rankings_of_the_page(folder: Path) -> None:
    """Both forms are read, with any name of the file."""
    text = (ROOT / "docs/pruning.md").read_text(encoding="utf-8")
    lines = re.findall(r'^    (\{"layer".*?\}) ', text, re.MULTILINE)
    assert len(lines) == 2
    from ktconv.stats.scores import read_scores

    for number, line in enumerate(lines):
        path = folder / f"ranking{number}"
        path.write_text(line)
        assert read_scores(path).layers.keys() == {3}


def test_the_example_of_help(folder: Path) -> None:
    """Its options, with a ranking."""
    text = " ".join(ktconv_done("prune", "--help").split())
    found = re.search(r"Example: ktconv (prune \S+ \S+ --scores \S+ --keep 96)", text)
    assert found is not None
    example = found[1].replace("Qwen/Qwen3-30B-A3B", "MODEL")
    words = shlex.split(example.replace("--keep 96", f"--keep {KEEP}"))
    ranks = [f'{{"layer": {layer}, "ids": [5, 4, 3, 2, 1, 0]}}\n' for layer in (0, 1)]
    (folder / "scores.json").write_text("".join(ranks))
    ktconv_done(*words)
    assert (folder / "qwen3-96" / "ktconv.json").exists()
