"""An extension that was built from another header is refused before anything is called."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ktconv.errors import StaleBuildError
from ktconv.native import build


def test_the_extension_is_that_of_the_header() -> None:
    assert build.HEADER.is_file()
    build.check_build()


@pytest.mark.parametrize(
    ("part", "old", "new", "stale"),
    [
        ("ktconv_base.h", "int kt_isa_at(int index);", "int kt_isa_at(int i);", True),
        ("ktconv_convert.h", "int32_t group; ", "int64_t group; ", True),
        ("ktconv_run.h", "int64_t kt_limit_ops(void);", "int32_t kt_limit_ops(void);", True),
        ("ktconv_convert.h", "/* 2^(byte", "/* =", False),
    ],
)
def test_declarations_count_and_comments_do_not(
    part: str, old: str, new: str, stale: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = shutil.copytree(build.HEADER.parent, tmp_path / "include") / "ktconv.h"
    text = (header.parent / part).read_text()
    assert old in text
    (header.parent / part).write_text(text.replace(old, new))
    monkeypatch.setattr(build, "HEADER", header)
    if not stale:
        build.check_build()
        return
    with pytest.raises(
        StaleBuildError, match=r"_native.*built from another version of .*ktconv\.h"
    ):
        build.check_build()


def test_an_installed_package_has_no_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "HEADER", tmp_path / "ktconv.h")
    build.check_build()
