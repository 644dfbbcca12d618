"""KTCONV_ASSUME: a level that the CPU does not report, for runs under an emulator."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import amx
from helpers.cli import process
from helpers.disk_calls import Commands

from ktconv import native

pytestmark = [pytest.mark.slow, pytest.mark.process]

LEVELS = list(native.ISA_NAMES.values())


def cpu_of(code: int, stdout: str, stderr: str) -> dict[str, Any]:
    assert code == 0, stderr
    found: dict[str, Any] = json.loads(stdout)["cpu"]
    return found


@cache
def cpu(commands: Commands, **changes: str) -> dict[str, Any]:
    """Features of the CPU, as a process with changed environment variables reports them: the
    library reads these when it is first asked for a level."""
    done = commands.run(["doctor", "--json"], variables=changes)
    return cpu_of(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("level", LEVELS)
def test_claims_and_never_lowers(commands: Commands, level: str) -> None:
    plain = cpu(commands, KTCONV_ASSUME="", KTCONV_ISA="")
    claimed = cpu(commands, KTCONV_ASSUME=level, KTCONV_ISA="")
    highest = max(LEVELS.index(level), LEVELS.index(plain["levels"][-1]))
    assert claimed["levels"] == LEVELS[: highest + 1]
    assert claimed["level_in_use"] == LEVELS[highest]
    assert claimed["features"] == plain["features"], "what the CPU reports stays what it is"


def test_a_claimed_level_can_be_lowered(commands: Commands) -> None:
    found = cpu(commands, KTCONV_ASSUME="amx", KTCONV_ISA="scalar")
    assert (found["levels"], found["level_in_use"]) == (LEVELS, "scalar")


@pytest.mark.parametrize("word", ["mmx", "AMX", "amx "])
def test_unknown_name(commands: Commands, word: str) -> None:
    """The words name the variable that is wrong, and only that one."""
    found = cpu(commands, KTCONV_ASSUME=word, KTCONV_ISA="scalar")["level_in_use"]
    assert f"KTCONV_ASSUME={word}" in found
    assert "KTCONV_ISA" not in found


def test_doctor_says_that_amx_is_claimed(commands: Commands, emulator: amx.Emulator) -> None:
    assert "KTCONV_ASSUME" in cpu(commands, KTCONV_ASSUME="amx")["amx"]
    assert "KTCONV_ASSUME" not in cpu(commands, KTCONV_ASSUME="")["amx"]


def test_under_the_emulator(emulator: amx.Emulator, tmp_path: Path) -> None:
    """Preloaded, it leaves a report, also of a program that executed no tiles."""
    report = tmp_path / "report"
    done = process("doctor", "--json", **emulator.environment(report))
    found = cpu_of(done.returncode, done.stdout, done.stderr)
    assert found["levels"] == LEVELS
    assert amx.read_report(report).products == 0
