"""`verify --ray`: the report of one machine, whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import ktconv, refused

from ktconv.distributed import verification
from ktconv.distributed.cluster import Cluster

pytestmark = pytest.mark.slow


def report(output: Path, *more: object) -> dict[str, Any]:
    result = ktconv("verify", output, *more, "--json", "--level=weights")
    facts: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if facts["passed"] else 1)
    for name in ("seconds", "peak_memory_bytes", "peak_rss_bytes", "threads", "provenance"):
        facts.pop(name, None)
    return facts


def test_the_same_report(cluster: Cluster, model: Path, clean: Path) -> None:
    there = report(clean, "--source", model, "--ray", "--threads=1")
    assert there["passed"] and there == report(clean, "--source", model)
    some = ("--source", model, "--sample=0.5", "--seed=3")
    assert report(clean, *some, "--ray") == report(clean, *some)


def test_the_same_failures(
    cluster: Cluster, model: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a unit is read by several jobs."""
    monkeypatch.setattr(verification, "JOB_BYTES", 50_000)
    (tmp_path / "damaged").mkdir()
    for path in clean.iterdir():
        if path.is_file():
            (tmp_path / "damaged" / path.name).write_bytes(path.read_bytes())
    for shard in sorted((tmp_path / "damaged").glob("*.safetensors")):
        data = bytearray(shard.read_bytes())
        for place in range(len(data) // 2, len(data) // 2 + 4000, 400):
            data[place] ^= 0x55
        shard.write_bytes(data)
    there = report(tmp_path / "damaged", "--source", model, "--ray")
    here = report(tmp_path / "damaged", "--source", model)
    assert not here["passed"] and here["failure_count"] > 5
    assert sorted(map(str, there.pop("failures"))) == sorted(map(str, here.pop("failures")))
    assert there == here


def test_what_nodes_do_not_have(
    cluster: Cluster, model: Path, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "_digest", lambda checks: "other")
    words = ("verify", clean, "--source", model, "--ray", "--level=weights")
    result = ktconv(*words)
    assert result.exit_code == 2 and "is not what it is on the driver" in result.stderr
    assert "equal copies; then verify again." in result.stderr and result.stdout == ""
    refused(ktconv("verify", clean, clean, "--ray"), 2, "--ray does not apply when comparing")
