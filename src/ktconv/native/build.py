"""Whether the compiled extension was built from the header of this source tree."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from ktconv import _native
from ktconv.errors import StaleBuildError

HEADER = Path(__file__).parents[3] / "native/include/ktconv.h"  # installed packages have none


def check_build() -> None:
    """StaleBuildError for an extension whose declarations differ from the header's."""
    if not HEADER.is_file():
        return
    text = HEADER.read_text(encoding="utf-8")
    text = text.split("/* --- begin cffi --- */")[1].split("/* --- end cffi --- */")[0]
    declared = zlib.crc32(re.sub(r"/\*.*?\*/|\s", "", text, flags=re.DOTALL).encode())
    if getattr(_native.lib, "KT_DECLARATIONS", None) != declared:
        raise StaleBuildError(
            f"{_native.__file__} was built from another version of {HEADER}",
            "build it again: pip install -e .",
        )
