"""Random calls of the C library: python tests/fuzz/native.py --seconds 60 SANITIZED

SANITIZED is native/test/random_check.c, built with the sanitizers. It runs for a third of the time;
for the others the same calls go to the extension that is installed, in memory that ends, and then
that begins, at an unreadable page. Prints the calls of each function at each level. A failure names
its case: run the program again with that --seed and --case. Exit code 1: there was one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]


def main() -> None:
    from helpers.random_calls import build_calls, calls_command, environment

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitized", metavar="SANITIZED")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    library = build_calls(ROOT / "build")
    share = ["--seconds", str(max(1, options.seconds // 3)), "--seed", str(options.seed)]
    failed = 0
    for title, command in {
        "sanitizers": [options.sanitized, "--memory", "heap", *share],
        "before an unreadable page": calls_command(library, "--memory", "end", *share),
        "behind an unreadable page": calls_command(library, "--memory", "start", *share),
    }.items():
        print(f"--- {title} ---", flush=True)
        failed |= subprocess.run(command, env=environment()).returncode != 0
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
