"""`ktconv bench --generate`: rows, what does not fit, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from helpers.cli import ktconv, ktconv_done, refused
from helpers.paths import EXAMPLE

from ktconv.bench.limits import Meter

pytestmark = [pytest.mark.slow, pytest.mark.torch]
pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = partial(Meter, 4 << 20, dot_seconds=(1e-4, 1e-4))
    monkeypatch.setattr("ktconv.generate.measure.Meter", meter)


def test_both_engines_and_their_times() -> None:
    words = ["bench", "--model", EXAMPLE, "--generate", "12,4", "--format"]
    report = json.loads(ktconv_done(*words, "json"))
    assert report["mode"] == "generate"
    ours, theirs = report["rows"]
    assert (ours["engine"], theirs["engine"]) == ("ktconv", "transformers")
    for row in (ours, theirs):
        assert row["prompt_tokens"] == 12 and row["new_tokens"] == 4
        assert 0 < row["decode_experts_ms"] < row["decode_ms"]
        assert 0 < row["prefill_experts_s"] < row["prefill_s"]
    assert ours["outside_bytes"] == theirs["outside_bytes"] > 0
    assert "tokens/s written" in ktconv_done(*words, "table")


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktconv.errors import MemoryShortError

    def short(*_: object, **__: object) -> None:
        raise MemoryShortError("loading MODEL needs about 1 TB of memory")

    monkeypatch.setattr("ktconv.generate.measure.load_model", short)
    table = ktconv_done("bench", "--model", EXAMPLE, "--generate", "4,2")
    assert "transformers alone was not measured: loading MODEL needs about 1 TB" in table


@pytest.mark.parametrize("counts", ["512", "0,4", "4,1", "a,b", "1,2,3", "4,1048577"])
def test_counts_that_cannot_be(counts: str) -> None:
    result = ktconv("bench", "--model", EXAMPLE, "--generate", counts)
    refused(result, 2, "must be the tokens of a prompt", "from 2 to 1048576")


def test_more_tokens_than_the_model_reads(tmp_path: Path) -> None:
    result = ktconv("bench", "--model", EXAMPLE, "--generate", "100000,2")
    refused(result, 2, "is more than")
