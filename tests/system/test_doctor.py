"""`ktconv doctor`: what this machine can do, for scripts and for people."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from helpers.amx import program_levels
from helpers.cli import process

import ktconv as package
from ktconv import native
from ktconv.inspect import doctor
from ktconv.system import machine

pytestmark = [pytest.mark.slow, pytest.mark.process]


def facts(**changes: str) -> dict[str, object]:
    done = process("doctor", "--json", **changes)
    assert (done.returncode, done.stderr) == (0, "")
    content: dict[str, object] = json.loads(done.stdout)
    return content


def test_doctor_json() -> None:
    found = facts(KTCONV_ISA="")
    assert found["ktconv"] == package.__version__
    assert found["python"] == platform.python_version()
    cpu = found["cpu"]
    assert isinstance(cpu, dict)
    assert cpu["usable_cpus"] == machine.usable_cpus()
    assert cpu["numa_nodes"] == machine.numa_nodes() >= 1
    assert cpu["levels"] == program_levels()
    assert cpu["levels"][0] == "scalar"
    assert cpu["level_in_use"] in cpu["levels"]
    assert set(cpu["features"]) == {name for name, there in native.cpu_features().items() if there}
    assert cpu["amx"]
    nodes = found["numa_nodes"]
    assert isinstance(nodes, dict)
    assert sum(node["cpus"] for node in nodes.values()) >= machine.usable_cpus()
    assert all(0 < node["available_bytes"] <= node["total_bytes"] for node in nodes.values())
    assert found["remarks"] == [] or len(nodes) > 1
    memory, disk = found["memory"], found["disk"]
    assert isinstance(memory, dict)
    assert isinstance(disk, dict)
    assert 0 < memory["available_bytes"] <= memory["total_bytes"]
    assert disk["directory"] == os.getcwd()  # noqa: PTH109 - the same spelling
    assert disk["free_bytes"] > 0
    packages = found["packages"]
    assert isinstance(packages, dict)
    assert {"torch", "transformers", "huggingface_hub"} <= packages.keys()


def test_level_is_forced() -> None:
    cpu = facts(KTCONV_ISA="scalar")["cpu"]
    assert isinstance(cpu, dict)
    assert cpu["level_in_use"] == "scalar"


@pytest.mark.parametrize("word", ["mmx", "AVX512", "amx "])
def test_bad_level_is_shown_and_not_raised(word: str) -> None:
    """doctor is what one runs when something is wrong."""
    cpu = facts(KTCONV_ISA=word)["cpu"]
    assert isinstance(cpu, dict)
    assert "KTCONV_ISA" in cpu["level_in_use"]
    assert word in cpu["level_in_use"]


def test_doctor_text() -> None:
    done = process("doctor")
    assert done.returncode == 0
    lines = [line.strip() for line in done.stdout.splitlines()]
    for word in ("cpu", "memory", "disk", "packages", "levels", "level in use", "total bytes"):
        assert any(line.startswith(word) for line in lines), word


def test_versions_that_others_do_not_work_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when transformers was upgraded beside llm-compressor."""
    pytest.importorskip("packaging")
    versions = {"transformers": "5.23.0", "llmcompressor": "0.14.0.1", "ktconv": "0.1"}
    needed = {
        "llmcompressor": ["transformers<=5.17.0,>=5.15.0", 'transformers<5; extra == "old"'],
        "ktconv": ['transformers>=5.15; extra == "model"', 'llmcompressor<0.15; extra == "gpu"'],
    }

    def of(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "version", of)
    monkeypatch.setattr(doctor, "requires", lambda name: needed.get(name))
    packages = doctor.examine(Path.cwd())["packages"]
    assert packages["transformers"] == "5.23.0; llmcompressor 0.14.0.1 needs <=5.17.0,>=5.15.0"
    assert packages["llmcompressor"] == "0.14.0.1"
    assert packages["datasets"] == "not installed (extra gpu)"
