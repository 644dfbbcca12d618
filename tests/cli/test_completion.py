"""The scripts of `ktconv completion`, run by shells that are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from helpers.cli import ktconv

from ktconv.cli.quantize_cpu import Method

pytestmark = [pytest.mark.slow, pytest.mark.process]

SCRIPT = f"""#!{sys.executable}
import sys
sys.argv[0] = "ktconv"
from ktconv.cli.entry import main
main()
"""
WORDS = {
    "quan": ["quantize-cpu", "quantize-gpu"],
    "quantize-cpu --me": ["--method", "--methods"],
    "quantize-cpu MODEL OUTPUT --method i": ["int4", "int8", "int4-g64", "int4-g128", "int8-g128"],
    "quantize-cpu MODEL OUTPUT --layout l": ["layers"],
    "completion ''": ["bash", "zsh", "fish"],
    "inspect ''": [],  # bash then completes files
}


def shell(name: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`code` run where `ktconv` is this one, in an empty home."""
    binary = shutil.which(name)
    if binary is None:
        pytest.skip(f"{name} is not installed")
    command = folder / "ktconv"
    command.write_text(SCRIPT)
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.run(
        [binary, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


def test_bash_completes(tmp_path: Path) -> None:
    lines = "".join(
        f"""COMP_WORDS=(ktconv {line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        complete_with ktconv; echo "${{COMPREPLY[@]}}"
        """
        for line in WORDS
    )
    code = f"""source <(ktconv completion bash); compopt() {{ echo compopt "$@" >&2; }}
    function=$(complete -p ktconv | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    complete_with() {{ COMPREPLY=(); $function "$@"; }}
    {lines}"""
    ended = shell("bash", code, tmp_path)
    assert [line.split() for line in ended.stdout.splitlines()] == list(WORDS.values())
    assert ended.stderr == "compopt -o default\n"  # files, where there is nothing else
    assert [path.name for path in tmp_path.iterdir()] == ["ktconv"]


def test_fish_completes(tmp_path: Path) -> None:
    code = "ktconv completion fish | source; complete -C 'ktconv quantize-cpu a b --method '"
    ended = shell("fish", code, tmp_path)
    methods = [line.split()[0] for line in ended.stdout.splitlines()]
    assert sorted(methods) == sorted(get_args(Method))


def test_zsh_takes_the_script(tmp_path: Path) -> None:
    code = """autoload -Uz compinit; compinit -u -D; source <(ktconv completion zsh)
    print -r -- $_comps[ktconv]"""
    ended = shell("zsh", code, tmp_path)
    assert ended.stdout.strip() == "_ktconv_completion" and ended.stderr == ""


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_scripts_ask_ktconv(name: str) -> None:
    result = ktconv("completion", name)
    assert f"_KTCONV_COMPLETE={name}_complete" in result.stdout


@pytest.mark.parametrize("words", [["completion"], ["completion", "tcsh"]])
def test_other_shells_are_refused(words: list[str]) -> None:
    result = ktconv(*words)
    assert result.exit_code == 2
    assert all(name in result.stderr for name in ("bash", "zsh", "fish"))


# ---- old spellings ---------------------------------------------------------------------------

SCRIPTS = {
    "bash": ".bash_completions/ktconv.sh",
    "zsh": ".zfunc/_ktconv",
    "fish": ".config/fish/completions/ktconv.fish",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_show_completion_is_of_the_own_shell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{name}")
    assert ktconv("--show-completion").stdout == ktconv("completion", name).stdout


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("before", [None, b"", b"# \xff, no end of line", b"# a line\n"])
def test_install_completion(
    name: str, before: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "it's"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SHELL", f"/bin/{name}")
    script, startup = home / SCRIPTS[name], home / f".{name}rc"
    if before is not None:
        (tmp_path / "elsewhere").write_bytes(before)
        startup.symlink_to(tmp_path / "elsewhere")
    first = ktconv("--install-completion")
    assert first.exit_code == 0 and f"wrote {script}" in first.stdout
    assert script.read_text() == ktconv("completion", name).stdout
    files = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    if name == "fish":
        assert (startup.read_bytes() if before is not None else None) == before
    else:
        assert f"a line to {startup}" in first.stdout
        kept = (before or b"").removesuffix(b"\n")
        assert files[startup].startswith(kept) and files[startup].endswith(b"\n")
        assert len(files[startup].splitlines()) == (2 if kept else 1)
        assert startup.is_symlink() == (before is not None)
    script.write_text("of an older ktconv")
    again = ktconv("--install-completion")
    assert again.exit_code == 0 and "a line to" not in again.stdout
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == files


def test_bash_loads_what_was_installed(tmp_path: Path) -> None:
    code = """SHELL=$BASH ktconv --install-completion; . ~/.bashrc; complete -p ktconv"""
    assert shell("bash", code, tmp_path).stdout.endswith(" ktconv\n")


@pytest.mark.parametrize("word", ["--install-completion", "--show-completion"])
@pytest.mark.parametrize("own", ["/bin/tcsh", "", None])
def test_no_completion_of_an_other_shell(
    word: str, own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SHELL", raising=False)
    if own is not None:
        monkeypatch.setenv("SHELL", own)
    result = ktconv(word)
    assert result.exit_code == 2 and "ktconv completion bash" in result.stderr
    assert f"SHELL is {'tcsh' if own else 'not set'}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHELL", "/bin/bash")
    result = ktconv("--install-completion")
    assert result.exit_code in (2, 3) and "cannot write" in result.stderr
