"""A small emulated machine with any NUMA nodes, that runs a Python script with this ktconv.

Its root is an archive in memory: this Python, the packages that ktconv needs, busybox, and the
script. The kernel comes from the distribution's archive, unpacked and not installed. Everything is
emulated, as not every machine that has KVM can use it: fifty times slower than the machine it runs
on, so that times mean nothing.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

QEMU = "qemu-system-x86_64"
PROGRAMS = (QEMU, "cpio", "busybox")
KERNELS = ("linux-image-cloud-amd64", "linux-image-virtual", "linux-image-kvm")  # Debian, Ubuntu
APPLETS = ("sh", "mount", "mkdir", "poweroff")
CROWDS = "2 8 32 64"  # threads
LEFT_OUT = (  # of the standard library
    "test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter", "lib2to3", "ensurepip",
    "config-*", "pydoc_data", "turtledemo", "*.opt-?.pyc",
)  # fmt: skip


@dataclass(frozen=True)
class Nodes:
    """Nodes of a machine: CPUs and MB of memory of each."""

    cpus: Sequence[int]
    memory: Sequence[int]

    def options(self) -> Iterator[str]:
        first = 0
        for number, (cpus, size) in enumerate(zip(self.cpus, self.memory, strict=True)):
            words = [f"node,nodeid={number}"]
            if cpus:
                words.append(f"cpus={first}-{first + cpus - 1}")
            if size:
                yield from ("-object", f"memory-backend-ram,id=m{number},size={size}M")
                words.append(f"memdev=m{number}")
            yield from ("-numa", ",".join(words))
            first += cpus
        yield from ("-smp", str(sum(self.cpus)), "-m", str(sum(self.memory)))


def why_not() -> str | None:
    """Reason why nothing can be booted here; None: it can."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "emulated machines are x86-64 Linux"
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not installed (qemu-system-x86, cpio, busybox-static)"
    return None


def kernel(kept: Path) -> Path:
    """A kernel image, fetched once. OSError where the distribution has none that we know."""
    image = kept / "vmlinuz"
    if image.exists():
        return image
    kept.mkdir(parents=True, exist_ok=True)
    for name in KERNELS:
        asked = subprocess.run(["apt-cache", "depends", name], capture_output=True, text=True)
        match = re.search(r"Depends: (linux-image-\S+)", asked.stdout)
        if match is None:
            continue
        got = subprocess.run(["apt-get", "download", match[1]], cwd=kept, capture_output=True)
        package = next(kept.glob("linux-image-*.deb"), None)
        if got.returncode or package is None:
            continue
        subprocess.run(["dpkg", "-x", package, kept / "unpacked"], check=True)
        next((kept / "unpacked/boot").glob("vmlinuz-*")).rename(image)
        return image
    raise OSError(f"the package archive has none of {', '.join(KERNELS)}")


def archive(kept: Path, source: Path, script: Path, native: Path) -> Path:
    """The root of the machine, not compressed: that would have to be undone there."""
    root = kept / "root"
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("proc", "sys", "dev", "tmp", "bin", "site", "group"):
        (root / folder).mkdir(parents=True)
    shutil.copy2(str(shutil.which("busybox")), root / "bin/busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    python = Path(sys.executable).resolve()
    _copy(python, root)
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    for library in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        shutil.copytree(library, root / library.lstrip("/"), ignore=ignored, dirs_exist_ok=True)
    for name in _closure("ktconv"):
        _copy_package(name, root / "site")
    shutil.copytree(source, root / "site/ktconv", ignore=shutil.ignore_patterns("__pycache__"))
    _compile(root)
    binaries = [python, *(root / "site").rglob("*.so*"), *root.rglob("lib-dynload/*.so")]
    for needed in _libraries(binaries):
        _copy(needed, root)
    shutil.copy2(script, root / "script.py")
    _build(native, root / "bin/crowd")
    init = root / "init"
    init.write_text(
        "#!/bin/sh\nmount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n"
        "mkdir -p /dev/shm; mount -t tmpfs shm /dev/shm; mount -t cgroup2 none /group\n"
        f"export PATH=/bin HOME=/tmp LANG=C.UTF-8 PYTHONPATH=/site\n"
        f"read line < /proc/cmdline; echo '=== up'\n"
        f'case " $line " in *" crowd "*) crowd {CROWDS} ;; *) {python} /script.py $line ;; esac\n'
        'echo "=== exit $?"; poweroff -f\n'
    )
    init.chmod(init.stat().st_mode | stat.S_IXUSR)
    return _packed(root, kept / "initrd")


def _build(native: Path, program: Path) -> None:
    """The pool alone, with the program that measures it."""
    sources = [native / "test/pool_crowd.c", *sorted((native / "src/pool").glob("*.c"))]
    compiler = os.environ.get("CC", "cc")
    options = ["-std=c11", "-O2", "-static", "-pthread", f"-I{native / 'include'}"]
    subprocess.run([compiler, *options, *sources, "-o", program], check=True)


def _compile(root: Path) -> None:
    """Compiled modules of what has none yet: compiling them there takes minutes."""
    compileall.compile_dir(root, quiet=2, stripdir=str(root), workers=1)


def _copy(path: Path, root: Path) -> None:
    place = root / str(path).lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, place)


def _closure(name: str) -> list[str]:
    """Packages that one needs, without itself and without extras."""
    found: dict[str, None] = {}
    waiting = [name]
    while waiting:
        try:
            needed = distribution(waiting.pop()).requires or []
        except PackageNotFoundError:
            continue  # for another Python or system
        for text in needed:
            other = re.split(r"[^\w.-]", text, maxsplit=1)[0].lower()
            if "extra ==" not in text and other not in found:
                found[other] = None
                waiting.append(other)
    return list(found)


def _copy_package(name: str, site: Path) -> None:
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return
    for file in files:
        if ".." in file.parts or "tests" in file.parts:
            continue
        place = site / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(str(file.locate()), place)


def _libraries(binaries: Iterable[Path]) -> set[Path]:
    """Shared libraries, and their loader, by the names under which programs look for them."""
    found: set[Path] = set()
    for binary in binaries:
        asked = subprocess.run(["ldd", binary], capture_output=True, text=True)
        found |= {Path(word) for word in re.findall(r"(/\S+)", asked.stdout) if "site/" not in word}
    return {path for path in found if path.exists() and ".so" in path.name}


def _packed(root: Path, to: Path) -> Path:
    names = b"\0".join(
        os.fsencode(path.relative_to(root)) for path in sorted(root.rglob("*"))
    )  # folders before what is in them
    with to.open("wb") as out:
        subprocess.run(
            ["cpio", "-0", "-o", "-H", "newc", "--quiet"],
            cwd=root, input=names, stdout=out, check=True,
        )  # fmt: skip
    return to


def boot(image: Path, root: Path, nodes: Nodes, words: str, seconds: int) -> str:
    """Runs the script with these words; returns what it printed, within `seconds`."""
    command = [
        QEMU, "-accel", "tcg,thread=multi", "-cpu", "max", "-nographic",
        "-no-reboot", "-kernel", str(image), "-initrd", str(root), *nodes.options(),
        "-append", f"console=ttyS0 rdinit=/init quiet panic=-1 {words}",
    ]  # fmt: skip
    said = root.with_name("said.txt")
    with said.open("wb") as out, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdout=out, stdin=subprocess.DEVNULL, timeout=seconds, check=False)
    text = said.read_text(errors="replace").replace("\r", "")
    return text.partition("=== up\n")[2] or text[-4000:]
