"""Outputs as sources: decoded or kept, but not rounded a second time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cli import ktconv
from helpers.corrupt import check
from helpers.layered import layered_model
from helpers.recoded import encode


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Outputs of one model by method."""
    where = tmp_path_factory.mktemp("sources")
    model = layered_model(where / "model", 1)

    def get(scheme: str) -> Path:
        if not (where / scheme).exists():
            encode(model, where / scheme, scheme)
        return where / scheme

    return get


SECOND = [
    ("rawint4", ["--method", "int4-g64"], "rawint4: int4-g64 would round"),
    ("rawint4", ["--method", "int4"], "rawint4: --method int4 would round"),
    ("fp8", ["--method", "mxfp8"], "fp8: mxfp8 would round"),
    ("mxfp4", ["--method", "nvfp4"], "mxfp4: nvfp4 would round"),
    ("int8-g128", ["--target-bits", "5", "--methods", "rawint4"], "int8-g128: the recipe would"),
]


@pytest.mark.parametrize(("scheme", "words", "message"), SECOND)
def test_outputs_are_not_rounded_twice(
    scheme: str, words: list[str], message: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    done = ktconv("quantize-cpu", made(scheme), tmp_path / "out", *words)
    assert done.exit_code == 2 and message in done.stderr, done.stderr
    assert "--requantize" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("rawint4", ["--method", "bf16"]),
        ("rawint4", ["--method", "rawint4"]),
        ("fp8-channel", ["--recipe", "recipe.toml"]),
        ("bf16", ["--method", "nvfp4"]),
        ("rawint4", ["--method", "int4-g64", "--requantize"]),
    ],
)
def test_outputs_as_sources(
    scheme: str, words: list[str], made: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text('method = "FP8_DYNAMIC"')
    given = [tmp_path / word if word == "recipe.toml" else word for word in words]
    done = ktconv("quantize-cpu", made(scheme), tmp_path / "out", *given)
    assert done.exit_code == 0, done.stderr
    assert check(tmp_path / "out", made(scheme)).passed
