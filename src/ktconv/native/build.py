"""Whether the compiled extension was built from the header of this source tree."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from ktconv import _native
from ktconv.errors import StaleBuildError

HEADER = Path(__file__).parents[3] / "native/include/ktconv.h"  # installed packages have none


def declarations(header: Path) -> str:
    """The declarations of ktconv.h and its parts, as native/build_ffi.py reads them."""
    names = re.findall(r'^#include "(\w+\.h)"', header.read_text("utf-8"), re.MULTILINE)
    texts = [(header.parent / name).read_text("utf-8") for name in names]
    begin, end = "/* --- begin cffi --- */", "/* --- end cffi --- */"
    return "".join(text.split(begin)[1].split(end)[0] for text in texts)


def check_build() -> None:
    """StaleBuildError for an extension whose declarations differ from the header's."""
    if not HEADER.is_file():
        return
    text = re.sub(r"/\*.*?\*/|\s", "", declarations(HEADER), flags=re.DOTALL)
    if getattr(_native.lib, "KT_DECLARATIONS", None) != zlib.crc32(text.encode()):
        raise StaleBuildError(
            f"{_native.__file__} was built from another version of {HEADER}",
            "build it again: pip install -e .",
        )
