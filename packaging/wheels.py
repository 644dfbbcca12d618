"""Builds wheels that need no compiler: python packaging/wheels.py [x86_64] [aarch64]

One for each architecture, for every CPython from 3.10 on (abi3) and every glibc from 2.17 on
(manylinux_2_17), with Zig's clang as the compiler for both. Each is checked with auditwheel. That
of this machine's architecture is installed into an empty environment, where no compiler can be
found, and converts and verifies the example. They go to dist/, with a source distribution, what the
wheel was tried with (ktconv.cdx.json, CycloneDX) and SHA-256 of all in SHA256SUMS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST, WORK = ROOT / "dist", ROOT / "build/wheels"
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.17"  # the oldest that manylinux has
# Without it clang hoists broadcasts over the asm that keeps unrolled lines apart, and runs
# out of vector registers: INT8 was 0.86 times as fast as with GCC at 512 tokens, and is 0.95 times.
CODE = "-mllvm -enable-misched=false"
EXAMPLE = ROOT / "docs/example/tiny-moe"
CONSTRAINTS = ROOT / "constraints.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", metavar="ARCH", help="default: both")
    chosen = parser.parse_args().architectures or ARCHITECTURES
    if unknown := [one for one in chosen if one not in ARCHITECTURES]:
        sys.exit(f"{unknown[0]} is not one of {', '.join(ARCHITECTURES)}")
    for architecture in chosen:
        wheel = build(architecture)
        audit(wheel, architecture)
        print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB")
        if architecture == platform.machine():
            print(f"in an empty environment: levels {', '.join(try_out(wheel))}")
            bill_of_materials()
    run([sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(DIST)])
    write_sums()


def build(architecture: str) -> Path:
    """The wheel, in dist/."""
    compiler = f"{sys.executable} -m ziglang cc -target {architecture}-linux-gnu.{GLIBC}"
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    base = WORK / architecture
    shutil.rmtree(base, ignore_errors=True)
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(base)]
    command += ["bdist_wheel", "--plat-name", tag, "--dist-dir", str(DIST)]
    command += ["--bdist-dir", str(base / "wheel")]
    run(command, CC=f"{compiler} {CODE}", LDSHARED=f"{compiler} -shared -s")
    return newest(f"*abi3-{tag}.whl")


def newest(pattern: str) -> Path:
    return max(DIST.glob(pattern), key=lambda path: path.stat().st_mtime)


def audit(wheel: Path, architecture: str) -> None:
    """Ends with auditwheel's report where the wheel needs more than its name says."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    wanted = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    said = " ".join(done.stdout.split())
    if done.returncode or f'"{wanted}"' not in said:
        sys.exit(f"{wheel.name} is not {wanted}:\n{done.stdout}{done.stderr}")


def try_out(wheel: Path) -> list[str]:
    """Installs the wheel where nothing else is, converts, verifies; the levels that it has there.

    Ends with a sentence where these are not those of a build from source, beside this interpreter.
    """
    place = WORK / "empty"
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    python = str(place / "bin/python")
    run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check",
         "--only-binary=:all:", "-c", str(CONSTRAINTS), str(wheel)])  # fmt: skip
    alone = {"PATH": str(place / "bin"), "PYTHONPATH": "", "CC": "/no/compiler"}
    ktconv, output = str(place / "bin/ktconv"), str(place / "output")
    run([ktconv, "quantize-cpu", str(EXAMPLE), output, "--method=int4", "--progress=none"], **alone)
    run([ktconv, "verify", output, "--source", str(EXAMPLE), "--progress=none"], **alone)
    found = json.loads(run([ktconv, "--version", "--json"], **alone))["levels"]
    here = json.loads(run([sys.executable, "-m", "ktconv", "--version", "--json"]))["levels"]
    if found != here:
        sys.exit(f"the wheel has the levels {found}, a build from source {here}")
    levels: list[str] = found
    return levels


def bill_of_materials() -> None:
    """Names, versions, licences and sources of the packages of the environment of `try_out`."""
    bill = DIST / "ktconv.cdx.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "-o", str(bill)]
    run([*command, str(WORK / "empty/bin/python")])


def write_sums() -> None:
    """For sha256sum --check."""
    files = sorted(path for path in DIST.iterdir() if path.suffix in (".whl", ".gz", ".json"))
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (DIST / "SHA256SUMS").write_text("".join(sums))


def run(command: list[str], **environment: str) -> str:
    """What it prints; ends with that where it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
