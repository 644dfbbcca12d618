"""What lies between layers: it survives kills, and damage to it is noticed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.disk_calls import hooked
from helpers.faults import no_space
from helpers.paths import EXAMPLE

pytest.importorskip("torch")

import torch

from ktconv.errors import CheckpointError, DiskFullError, KtconvError, ResourceError
from ktconv.model.streamed.states import STATE_FILE, Resumed, Scratch, States
from ktconv.source import open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.torch]

ALL_DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


@pytest.fixture
def states(tmp_path: Path) -> Iterator[States]:
    with States(tmp_path, sides=2, windows=3) as found:
        yield found


def value(layer: int, side: int, window: int) -> Any:
    """An output like those of layers: lengths differ by window, sizes by layer."""
    seed = torch.Generator().manual_seed(layer * 100 + side * 10 + window)
    tokens = 5 + window
    hidden = torch.randn(tokens, 8 + layer % 2, generator=seed).bfloat16()
    return hidden, {"kept": [torch.arange(tokens), None], 3: (True, 1.5, "x")}


def put_all(states: States, layer: int, sides: int = 2) -> None:
    for window in range(3):
        for side in range(sides):
            states.put(side, window, value(layer, side, window))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
        )
    if isinstance(left, (tuple, list)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


def holds(states: States, layer: int) -> bool:
    found = [(side, window) for side in range(2) for window in range(3)]
    return all(same(states.get(*one), value(layer, *one)) for one in found)


def test_every_dtype_comes_back_as_it_was(tmp_path: Path) -> None:
    given = [torch.randint(0, 2, (3, 5)).to(dtype) for dtype in ALL_DTYPES]
    given += [torch.tensor(2.5), torch.empty(0, 4), torch.empty(0, dtype=torch.int64)]
    given += [torch.arange(12.0).reshape(3, 4).T[1:], torch.full((2,), float("nan"))]
    with States(tmp_path, 1, 1) as states:
        states.put(0, 0, given)
        states.commit(1)
        found = states.get(0, 0)
    assert [one.dtype for one in found] == [one.dtype for one in given]
    assert [one.shape for one in found] == [one.shape for one in given]
    assert all(torch.equal(left, right) for left, right in zip(found[:-1], given[:-1], strict=True))
    assert found[-1].isnan().all()


def test_layers_follow_one_another(states: States) -> None:
    """Reading gives the old layer until the new one is complete."""
    put_all(states, 0)
    states.commit(1)
    for layer in range(1, 5):
        for window in range(3):
            for side in range(2):
                states.put(side, window, value(layer, side, window))
                assert same(states.get(side, window), value(layer - 1, side, window))
        states.commit(layer + 1)
        assert holds(states, layer)


def test_values_are_copies(states: States) -> None:
    given = torch.zeros(4)
    for side in range(2):
        for window in range(3):
            states.put(side, window, given)
    given += 1
    states.commit(1)
    states.get(0, 0).add_(5)
    assert states.get(0, 0).tolist() == [0, 0, 0, 0]


def test_sides_share_until_they_are_split(states: States) -> None:
    put_all(states, 0, sides=1)
    states.commit(1)
    assert not states.split and same(states.get(1, 2), value(0, 0, 2))
    put_all(states, 1)
    assert not states.split
    states.commit(2)
    assert states.split and same(states.get(1, 2), value(1, 1, 2))


@pytest.mark.parametrize("left_out", [(0, 1), (1, 0), (1, 2)])
def test_an_incomplete_layer_is_not_committed(states: States, left_out: tuple[int, int]) -> None:
    for side in range(2):
        for window in range(3):
            if (side, window) != left_out:
                states.put(side, window, value(0, side, window))
    with pytest.raises(ValueError, match="only"):
        states.commit(1)
    states.put(*left_out, value(0, *left_out))
    states.commit(1)
    assert holds(states, 0)


def test_files_are_as_large_as_the_largest_layer(tmp_path: Path) -> None:
    files = []
    with States(tmp_path, 1, 2) as states:
        for position, size in enumerate([100, 100_000, 100, 5_000, 300]):
            for _ in range(3):  # a window that is put again takes no more room
                states.put(0, 0, torch.zeros(size, dtype=torch.uint8))
            states.put(0, 1, torch.zeros(10, dtype=torch.uint8))
            states.commit(position)
            files.append(sorted(path.stat().st_size for path in tmp_path.glob("*.bin")))
    assert files == [[0, 110], [110, 100_010], [110, 100_010], [110, 5_010], [310, 5_010]]


@pytest.mark.parametrize("wrong", [object(), {1, 2}, np.zeros(3), {(1,): 2}, b"x"])
def test_what_cannot_be_kept_is_refused(states: States, wrong: Any) -> None:
    with pytest.raises(CheckpointError, match="contains a"):
        states.put(0, 0, (torch.zeros(2), wrong))


def test_sparse_and_complex_tensors_are_refused(states: States) -> None:
    for wrong in (torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()):
        with pytest.raises(CheckpointError, match="cannot be kept"):
            states.put(0, 0, wrong)


def test_windows_that_do_not_exist(states: States) -> None:
    for place in ((0, 3), (2, 0), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="no window"):
            states.put(*place, None)
        with pytest.raises(ValueError, match="no window"):
            states.get(*place)


# ---- going on --------------------------------------------------------------------------

ARRAYS = {
    "sums": np.arange(12, dtype=np.float64).reshape(3, 4)[:, ::2],
    "counts": np.array([2**40, 0]),
    "none": np.zeros((0, 3), np.float32),
    "flags": np.array([True, False]),
}
MORE = {"logit_sum": 0.1 + 0.2, "name": "ÿ\n", "list": [1, None, {"a": float("inf")}]}


def again(folder: Path) -> tuple[Resumed | None, list[str], States]:
    said: list[str] = []
    states = States(folder, 2, 3)
    return states.resume(said.append), said, states


def test_a_run_goes_on_where_one_was_killed(states: States, tmp_path: Path) -> None:
    for layer in range(3):
        put_all(states, layer)
        states.commit(layer + 1, MORE | {"layer": layer}, ARRAYS)
    states.put(0, 0, value(3, 0, 0))  # of the layer during which it is killed
    found, said, later = again(tmp_path)
    assert found is not None and said == [] and found.position == 3
    assert found.more == MORE | {"layer": 2}
    assert found.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
    assert holds(later, 2) and later.split
    put_all(later, 3)
    later.commit(4)
    assert holds(later, 3)


def test_nothing_is_there_at_first(tmp_path: Path) -> None:
    found, said, _ = again(tmp_path)
    assert found is None and said == []


class Killed(BaseException):
    pass


def test_a_kill_at_any_moment_leaves_one_whole_layer(tmp_path: Path) -> None:
    """Ahead of each call that changes the disk, while the third layer is made."""
    before = tmp_path / "before"
    before.mkdir()
    with States(before, 2, 3) as states:
        for layer in range(2):
            put_all(states, layer)
            states.commit(layer + 1, {"layer": layer})
    positions, call = [], 0
    while True:
        call += 1
        folder = tmp_path / f"kill-{call}"
        shutil.copytree(before, folder)
        calls = iter(range(1, 10_000))

        def strike(*_: Any, call: int = call, calls: Iterator[int] = calls) -> None:
            if next(calls) == call:
                raise Killed

        with States(folder, 2, 3) as states:
            assert states.resume() is not None
            try:
                with hooked(strike):
                    put_all(states, 2)
                    states.commit(3, {"layer": 2})
            except Killed:
                pass
            else:
                break
        found, said, later = again(folder)
        assert found is not None and said == []
        assert found.more == {"layer": found.position - 1} and holds(later, found.position - 1)
        positions.append(found.position)
        later.close()
    assert positions == sorted(positions) and set(positions) == {2, 3} and len(positions) > 8


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def reseal(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], object]:
    """A state file that is whole, but says something else."""

    def changed(path: Path) -> None:
        import hashlib

        record = json.loads(json.loads(path.read_text())["record"])
        change(record)
        text = json.dumps(record)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"sha256": sha256, "record": text}))

    return changed


def _entry(key: str, wrong: Any) -> Callable[[Path], object]:
    return reseal(lambda record: record["entries"]["1/1"].update({key: wrong}))


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "first bit": ("data", lambda path: flip(path, 0)),
    "last bit": ("data", lambda path: flip(path, -1)),
    "shorter": ("data", truncate),
    "empty data": ("data", lambda path: os.truncate(path, 0)),
    "missing data": ("data", Path.unlink),
    "zeros": ("data", lambda path: path.write_bytes(bytes(path.stat().st_size))),
    "bit of the state": (STATE_FILE, lambda path: flip(path, 100)),
    "shorter state": (STATE_FILE, truncate),
    "empty state": (STATE_FILE, lambda path: os.truncate(path, 0)),
    "no JSON": (STATE_FILE, lambda path: path.write_bytes(b"\xff\xfe")),
    "deep JSON": (STATE_FILE, lambda path: path.write_text("[" * 10**5)),
    "other JSON": (STATE_FILE, lambda path: path.write_text('{"record": 3}')),
    "list": (STATE_FILE, lambda path: path.write_text("[]")),
    "other format": (STATE_FILE, reseal(lambda record: record.update(format=2))),
    "other windows": (STATE_FILE, reseal(lambda record: record.update(windows=4))),
    "no position": (STATE_FILE, reseal(lambda record: record.pop("position"))),
    "third slot": (STATE_FILE, reseal(lambda record: record.update(slot=2))),
    "behind the end": (STATE_FILE, _entry("at", 10**15)),
    "before the start": (STATE_FILE, _entry("at", -1)),
    "unknown dtype": (STATE_FILE, _entry("form", {"tensor": ["Storage", [1]]})),
    "objects": (STATE_FILE, _entry("form", {"array": ["|O", [1]]})),
    "huge": (STATE_FILE, _entry("form", {"tensor": ["float32", [10**12]]})),
    "negative": (STATE_FILE, _entry("form", {"tensor": ["float32", [-1, -1]]})),
    "unknown kind": (STATE_FILE, _entry("form", {"set": []})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_the_pass_starts_anew(tmp_path: Path, damage: str) -> None:
    with States(tmp_path, 2, 3) as states:
        put_all(states, 0)
        states.commit(1)  # into slot b
    name, change = DAMAGE[damage]
    change(tmp_path / ("states-b.bin" if name == "data" else name))
    found, said, later = again(tmp_path)
    assert found is None
    assert len(said) == 1 and "starting again" in said[0] and str(tmp_path) in said[0]
    put_all(later, 1)
    later.commit(1)
    assert holds(later, 1)
    found, said, _ = again(tmp_path)
    assert found is not None and said == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    for name in ("states-a.bin", STATE_FILE):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).symlink_to(outside)
        try:
            with States(folder, 1, 1) as states:
                assert states.resume() is None
                states.put(0, 0, torch.zeros(100))
                states.commit(1)
        except KtconvError as error:
            assert name in str(error)
        assert outside.read_bytes() == b"precious"


# ---- full disks ------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "fsync"])
def test_a_full_disk_is_one_sentence(
    states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    put_all(states, 0)
    states.commit(1)
    with monkeypatch.context() as patch, pytest.raises(DiskFullError) as raised:
        patch.setattr(os, call, no_space)
        put_all(states, 1)
        states.commit(2)
    assert str(tmp_path) in str(raised.value) and "are free" in str(raised.value)
    assert "--work-dir DIR" in (raised.value.hint or "")
    found, said, later = again(tmp_path)
    assert found is not None and found.position == 1 and said == [] and holds(later, 0)


def test_another_error_of_the_disk(states: States, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(ResourceError, match="I/O error"):
        states.put(0, 0, torch.zeros(3))


# ---- scratch ---------------------------------------------------------------------------


def test_scratch_goes_to_a_file_when_the_budget_is_used_up(tmp_path: Path) -> None:
    with Scratch(tmp_path, budget=4000) as scratch:
        tensors = [scratch.empty((500,), torch.float32) for _ in range(5)]
        assert scratch.file_bytes == 3 * 4096
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        scratch.trim()
        assert [one.unique().tolist() for one in tensors] == [[n] for n in range(5)]
        assert list(tmp_path.iterdir()) == []  # nothing that a kill could leave
        scratch.clear()
        assert scratch.file_bytes == 0
        assert tensors[4].unique().tolist() == [4]  # no SIGBUS
        scratch.empty((1000,), torch.float32)
        assert scratch.file_bytes == 0
        odd = scratch.empty((3, 0, 2), torch.bool)
        assert odd.shape == (3, 0, 2)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_scratch_has_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    with Scratch(tmp_path, budget=0) as scratch:
        one = scratch.empty((2, 3), dtype)
        one.copy_(torch.ones(2, 3))
        assert one.dtype == dtype and one.shape == (2, 3) and bool((one == 1).all())


def test_trimmed_pages_are_not_resident(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
import torch
from ktconv.model.streamed.states import Scratch
from ktconv.system.machine import resident_memory
scratch = Scratch(Path({str(tmp_path)!r}), 0)
before = resident_memory()
parts = [scratch.empty((1 << 20,), torch.int64).fill_(n) for n in range(8)]
assert resident_memory() - before < 20 << 20, resident_memory() - before
assert [int(one.sum()) for one in parts] == [n << 20 for n in range(8)]
assert resident_memory() - before > 60 << 20
scratch.trim()
assert resident_memory() - before < 10 << 20
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_shows_when_scratch_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Scratch(tmp_path, budget=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(DiskFullError, match="more are needed") as raised:
            scratch.empty((1000,), torch.float32)
    assert "--work-dir DIR" in (raised.value.hint or "") and str(tmp_path) in str(raised.value)
    assert scratch.empty((1000,), torch.float32).shape == (1000,)


def test_scratch_where_files_cannot_be_allocated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On such file systems, zeros are written instead."""

    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    scratch = Scratch(tmp_path, budget=0)
    assert not scratch.empty((5 << 20,), torch.float32).any()
    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(DiskFullError):
        scratch.empty((1000,), torch.float32)


def test_pages_of_scratch_do_not_gather_in_a_pass(tmp_path: Path) -> None:
    """Whenever an expert has been read, those of earlier ones may go."""
    pytest.importorskip("transformers")
    from ktconv.model.streamed.parts import PartedModel
    from ktconv.model.streamed.run import StreamedPass
    from ktconv.system.machine import resident_memory

    with States(tmp_path, 1, 0) as states, Scratch(tmp_path, 0) as scratch:
        one = StreamedPass(PartedModel(open_checkpoint(EXAMPLE)), [], states, scratch)
        part = scratch.empty((8 << 20,), torch.int64).fill_(7)
        before = resident_memory()
        one.read(0)
        assert before - resident_memory() > 48 << 20
        assert int(part.sum()) == 7 << 23
