"""Compiles the C library into the extension module ktconv._native.

API mode: the C compiler checks every declaration that cffi reads from the public
header against that header. No -march flag: each file names the instruction sets it
uses, and the library picks one at run time. -ffp-contract=off because a fused
multiply-add would round once where the format rounds twice. Two flags undo Python's own, which
come before: -g0 debug information, which takes the compiler longer than the code, and -fno-wrapv
sums of integers that wrap round, with which GCC computes addresses within inner loops one by one
(MXFP4 with AVX-512, 4 tokens: 599 instructions in place of 442).
"""

import re
import zlib
from pathlib import Path

from cffi import FFI

NATIVE = Path("native")  # setup.py runs in the project root
CODE = ["-std=c11", "-O3", "-g0", "-ffp-contract=off", "-fno-wrapv"]
SOURCES = sorted(path.as_posix() for path in (NATIVE / "src").rglob("*.c"))


def declarations() -> str:
    """Declarations for cffi: the parts of the public header in the order of its includes, without
    what cffi cannot parse."""
    include = (Path(__file__).parent if "__file__" in globals() else NATIVE) / "include"
    header = (include / "ktconv.h").read_text(encoding="utf-8")
    names = re.findall(r'^#include "(\w+\.h)"', header, re.MULTILINE)
    texts = [(include / name).read_text(encoding="utf-8") for name in names]
    begin, end = "/* --- begin cffi --- */", "/* --- end cffi --- */"
    return "".join(text.split(begin)[1].split(end)[0] for text in texts)


def checksum(text: str) -> int:
    """Of declarations without comments; ktconv.native.build compares it with the header's."""
    return zlib.crc32(re.sub(r"/\*.*?\*/|\s", "", text, flags=re.DOTALL).encode())


ffi = FFI()
ffi.cdef(declarations() + "\n#define KT_DECLARATIONS ...\n")
ffi.cdef('extern "Python" void ktconv_run_python(void *);')  # a task's work: ktconv.native.tasks
ffi.set_source(
    "ktconv._native",
    f'#include "ktconv.h"\n#define KT_DECLARATIONS {checksum(declarations())}u\n',
    sources=SOURCES,
    depends=sorted(path.as_posix() for path in NATIVE.rglob("*.h")),
    include_dirs=["native/include"],
    extra_compile_args=[*CODE, "-Wall", "-Wextra", "-Wno-psabi", "-pthread"],
    extra_link_args=["-pthread"],
)
