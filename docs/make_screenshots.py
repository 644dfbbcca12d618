"""Make the pictures of docs/pictures/ from docs/example: reports of verify and compare as a browser
shows them, plots of plan and bench.

    python docs/make_screenshots.py                # all; needs chromium, matplotlib and torch
    python docs/make_screenshots.py plan roofline  # some

Pages are files of this machine; the browser reads nothing from a network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

DOCS = Path(__file__).resolve().parent
MODEL = "tiny-moe"  # of docs/example
PICTURES = DOCS / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
COLOURS = 128  # of a palette, which the plots and pages of these pictures need no more of
MOST_BYTES = 200_000  # of a picture in the repository
NEEDS = {
    "verify": ("a browser",),
    "compare": ("a browser", "matplotlib"),
    "plan": ("matplotlib", "torch"),
    "roofline": ("matplotlib",),
}
WIDTH = 1228
HEIGHTS = {"verify": 1122, "compare": 1250}  # of pages that are longer; in pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NEEDS)}; default: all"
    )
    names = parser.parse_args().names or list(NEEDS)
    for name in names:
        if name not in NEEDS:
            sys.exit(f"there is no picture {name}: choose from {', '.join(NEEDS)}")
        for tool in NEEDS[name]:
            if not (browser() if tool == "a browser" else find_spec(tool)):
                sys.exit(f"the picture {name} needs {tool}, which is not installed here")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(DOCS / "example" / MODEL, Path(folder) / MODEL)
        for name in names:
            picture = Path(folder) / f"{name}.png"
            globals()[f"make_{name}"](Path(folder), picture)
            small(picture, PICTURES / f"{name}.png")


def make_verify(folder: Path, picture: Path) -> None:
    ktconv(folder, "quantize-cpu", MODEL, "int4", "--numa", "1", "--overwrite")
    ktconv(folder, "verify", "int4", "--source", MODEL, "--report", "verify.html")
    shoot(folder / "verify.html", picture, HEIGHTS["verify"])


def make_compare(folder: Path, picture: Path) -> None:
    methods = ["int4", "rawint4", "int8", "fp8", "bf16"]
    for method in methods:
        ktconv(folder, "quantize-cpu", MODEL, method, "--method", method, "--overwrite")
    words = [
        "--level",
        "layers",
        "--tokens",
        "1,64",
        "--seconds",
        "0.2",
        "--report",
        "compare.html",
    ]
    ktconv(folder, "compare", *methods, "--source", MODEL, *words)
    shoot(folder / "compare.html", picture, HEIGHTS["compare"])


def make_plan(folder: Path, picture: Path) -> None:
    (folder / "counts.json").write_text(ktconv(folder, "stats", MODEL, "--json"))
    words = ["--ep", "2", "--redundant", "2", "--load", "counts.json", "--numa", "1"]
    ktconv(folder, "plan", MODEL, *words, "--plot", picture)


def make_roofline(folder: Path, picture: Path) -> None:
    words = ["--shape", "deepseek-v3", "--experts", "24", "--method", "int4,int8,bf16"]
    words += ["--tokens", "1,4,16,64,256,512", "--seconds", "0.3"]
    ktconv(folder, "bench", *words, "--plot", picture)


def ktconv(folder: Path, *words: object) -> str:
    """The stdout of a command in `folder`, so that pictures show no path of this machine."""
    print("ktconv", *words, file=sys.stderr)
    command = [sys.executable, "-m", "ktconv", *map(str, words)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"ktconv {words[0]} ended with exit code {done.returncode}")
    return done.stdout


def browser() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def shoot(page: Path, picture: Path, height: int) -> None:
    """The upper part of a page of this machine."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                str(browser()), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
                "--no-first-run", "--disable-background-networking", "--disable-component-update",
                "--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}",
                f"--window-size={WIDTH},{height}", f"--screenshot={picture}", page.as_uri(),
            ],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip


def small(picture: Path, target: Path) -> None:
    """Reduce a picture to a palette, which takes a third of the bytes."""
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLOURS).save(target, optimize=True)
    if target.stat().st_size > MOST_BYTES:
        sys.exit(f"{target} has {target.stat().st_size} bytes, more than {MOST_BYTES}")


if __name__ == "__main__":
    main()
