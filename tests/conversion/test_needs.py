"""What a run needs of memory and disk, in numbers: threads that --max-memory allows, free space."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.cli import contents, write_model
from msgspec.structs import replace

from ktconv.conversion.run import DISK_MARGIN, Preflight, fit_threads, manifest_memory
from ktconv.errors import MemoryLimitError
from ktconv.quantize.packed import task
from ktconv.quantize.packed.run import Request, prepare, quantize_cpu
from ktconv.source.reading.matrices import loaded_together
from ktconv.system import machine
from ktconv.targets.packed.target import Options
from ktconv.writer.manifest import MANIFEST

MIB = 1 << 20
BASE, EACH = 100 * MIB, 10 * MIB


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 4)


@pytest.mark.parametrize(
    ("room", "wanted", "threads"),
    [
        (BASE + EACH, None, 1),
        (BASE + 2 * EACH - 1, None, 1),
        (BASE + 2 * EACH, None, 2),
        (BASE + 9 * EACH, None, 4),  # one for each CPU
        (BASE + 9 * EACH, 9, 9),  # as many as are asked for
        (BASE + 9 * EACH, 2, 2),
    ],
)
def test_threads_are_those_that_memory_has_room_for(
    room: int, wanted: int | None, threads: int
) -> None:
    assert fit_threads(room, wanted, BASE, EACH) == threads


@pytest.mark.parametrize(
    ("room", "wanted"), [(BASE + EACH - 1, None), (BASE + EACH - 1, 1), (BASE + 3 * EACH - 1, 3)]
)
def test_too_little_memory_is_refused_with_the_size_that_is_enough(
    room: int, wanted: int | None
) -> None:
    with pytest.raises(MemoryLimitError, match=rf"with {wanted or 1} threads?") as caught:
        fit_threads(room, wanted, BASE, EACH)
    enough = int(re.findall(r"--max-memory (\d+)MiB", str(caught.value.hint))[0])
    assert fit_threads(enough * MIB, wanted, BASE, EACH) == (wanted or 1)
    with pytest.raises(MemoryLimitError):
        fit_threads((enough - 1) * MIB, wanted, BASE, EACH)


def test_an_odd_need_is_rounded_up() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        fit_threads(BASE, 1, BASE, EACH + 1)
    assert "--max-memory 111MiB" in str(caught.value.hint)


def test_the_disk_must_hold_the_units_and_a_margin() -> None:
    units: list[Any] = [SimpleNamespace(output_bytes=size) for size in (5, 7)]
    nothing: Any = None
    planned: Preflight[Any] = Preflight(nothing, nothing, [], 1, 0, 0)
    assert planned.disk_needed(units) == 12 + DISK_MARGIN
    assert planned.disk_needed([]) == 0


def test_memory_for_an_earlier_manifest_grows_with_it(tmp_path: Path) -> None:
    assert manifest_memory(tmp_path) == 0
    (tmp_path / MANIFEST).write_bytes(b" " * 1000)
    assert manifest_memory(tmp_path) >= 2 * 1000
    small = manifest_memory(tmp_path)
    (tmp_path / MANIFEST).write_bytes(b" " * 3000)
    assert manifest_memory(tmp_path) == 3 * small


def test_matrices_are_converted_one_by_one_where_memory_is_scarce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output has the same bytes, and a limit too low for shared calls is no error."""
    model = write_model(tmp_path / "model", layers=1)
    steps: list[int] = []

    def loaded(wanted: Any, *others: Any) -> Any:
        steps.append(len(wanted))
        return loaded_together(wanted, *others)

    monkeypatch.setattr(task, "loaded_together", loaded)
    request = Request(str(model), tmp_path / "one", Options(numa=1), threads=16)
    roomy = prepare(request).peak_memory
    quantize_cpu(request)
    assert max(steps) == 12
    steps.clear()
    scarce = replace(request, output=tmp_path / "other", max_memory=roomy - 100 * MIB)
    assert prepare(scarce).peak_memory < scarce.max_memory
    quantize_cpu(scarce)
    assert steps == [1] * 12
    assert contents(tmp_path / "other") == contents(tmp_path / "one")
