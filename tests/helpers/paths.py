"""Where things lie beside the tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NATIVE = ROOT / "native"
EXAMPLE = DOCS / "example/tiny-moe"
EVAL = DOCS / "example/eval.txt"
MODELS = ROOT.parent / "shared/models"  # small trained models; not part of the repository
