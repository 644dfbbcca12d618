"""`import kt_kernel` means ktconv: in programs that are launched, in their children, by install."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from copy import copy
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType, new_class
from typing import Any

import pytest

from ktconv.compat.kt import alias
from ktconv.compat.kt.__main__ import USAGE, command
from ktconv.errors import UsageError

torch = pytest.importorskip("torch")

from ktconv.compat.kt import KTMoEWrapper, sft_names  # noqa: E402
from ktconv.compat.kt.sft import SFTWrapper  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch]

LINE = "import kt_kernel means ktconv, in child processes too"
# What sglang-kt 0.7.2 and the SGLang fork of KTransformers use on a wrapper, as `used` finds it.
ON_WRAPPERS = {
    "gpu_experts_mask", "init_lora_weights", "load_block_fp8_weights", "load_rawint4_weights",
    "load_weights", "set_capture_batch_sizes", "share_backward_bb", "submit_forward",
    "submit_forward_inference", "submit_write_weight_scale_to_buffer", "sync_forward",
    "sync_forward_inference", "sync_write_weight_scale_to_buffer", "cpu_infer",
}  # fmt: skip
OPTIONAL = {"moe"}  # asked for with a default: the FP8 transport, which the wrapper refuses
# Of SGLang's own class, which one of its files calls wrapper, too.
OTHERS = {
    "apply", "apply_cpu_only", "apply_gpu_only", "apply_with_timing", "load_cpu_weights",
    "load_gpu_weights",
}  # fmt: skip
NAMES = {  # that the wheel of kt_kernel 0.7.2 exports
    "AMXSFTMoEWrapper", "KTMoEWrapper", "__cpu_variant__", "__int8_kernel__",
    "__int8_weight_layout__", "__version__", "generate_gpu_experts_masks", "kt_kernel_ext",
}  # fmt: skip
SFT_NAMES = 94  # of kt_kernel.sft

PROGRAM = """
import multiprocessing, os, subprocess, sys
import kt_kernel, kt_kernel_ext
from kt_kernel import KTMoEWrapper, generate_gpu_experts_masks
from kt_kernel.kt_kernel_ext import CPUInfer
from kt_kernel_ext import moe
import kt_kernel.sft as sft
import ktconv.compat.kt as own

def child(queue):
    import kt_kernel
    queue.put(kt_kernel.KTMoEWrapper.__module__)

if __name__ == "__main__":
    assert KTMoEWrapper is own.KTMoEWrapper
    assert kt_kernel.kt_kernel_ext is kt_kernel_ext and kt_kernel_ext.moe is moe
    missing = [name for name in kt_kernel.__all__ if not hasattr(kt_kernel, name)]
    assert not missing, missing
    missing = [name for name in sft.__all__ if not hasattr(sft, name)]
    assert not missing, missing
    assert len(sft.__all__) == COUNT, len(sft.__all__)
    from kt_kernel.sft import get_fp8_runtime, get_rawint4_runtime, load_kt_model
    assert get_fp8_runtime().cpu_variant == kt_kernel.__cpu_variant__
    try:
        load_kt_model("MODEL")
    except Exception as error:
        assert str(error) == "ktconv has no kt_kernel.sft.load_kt_model", error
    assert not hasattr(kt_kernel_ext, "FP8LayerwiseTransport")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get() == "ktconv.compat.kt.wrapper"
    process.join()
    code = "from importlib.util import find_spec; print(find_spec('kt_kernel_ext').origin)"
    print(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
    print(sys.argv[1:], os.path.basename(sys.argv[0]))
    sys.exit(7)
""".replace("COUNT", str(SFT_NAMES))


MODULE = """
import os, sys
from importlib.util import find_spec
origin = str(find_spec("kt_kernel").origin)
print("ktconv" in origin, sys.argv[1:], os.path.basename(sys.argv[0]))
sys.exit(7)
"""


def launched(*arguments: str, directory: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ktconv.compat.kt", *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=directory, check=False, **more)


def test_a_program_and_its_children_see_ktconv(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launched("program.py", "--port", "1", directory=tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stderr.count(LINE) == 1, done.stderr
    own, arguments = done.stdout.splitlines()
    assert own == str(alias.DIRECTORY / "kt_kernel_ext.py")
    assert arguments == "['--port', '1'] program.py"


def test_a_module_that_is_run_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MODULE)
    done = launched("-m", "program", "--port", "1", directory=tmp_path)
    assert (done.returncode, done.stderr.count(LINE)) == (7, 1), done.stderr
    assert done.stdout == "True ['--port', '1'] program.py\n"


def test_the_line_is_said_once_by_all_processes(tmp_path: Path) -> None:
    code = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"
    done = launched("-c", code, "-m", "ktconv.compat.kt", "-c", "print(1)", directory=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count(LINE)) == (0, "1\n", 1), done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "there is no program in the command"),
        (["-m"], "-m has nothing behind it"),
        (["--port", "1"], "there is no program in --port 1"),
    ],
)
def test_a_command_without_a_program_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        command(given)
    assert caught.value.hint == USAGE


@pytest.mark.parametrize(
    "name",
    [
        "kt_kernel/__init__.py", "kt_kernel.py", "kt_kernel_ext.py",
        f"kt_kernel_ext{EXTENSION_SUFFIXES[0]}",  # as a build in the sources of kt_kernel leaves it
    ],
)  # fmt: skip
def test_another_kt_kernel_in_the_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    done = launched("-c", "import kt_kernel", directory=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: {tmp_path / name} would be imported instead")
    for program in (tmp_path, tmp_path / "program.py"):
        with pytest.raises(UsageError, match="would be imported instead"):
            command([str(program)])
    monkeypatch.chdir("/")
    assert command(["-m", "program"])[-2:] == ["-m", "program"]


def test_a_directory_without_modules_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "kt_kernel").mkdir()
    code = "from importlib.util import find_spec; print(find_spec('kt_kernel').origin)"
    done = launched("-c", code, directory=tmp_path)
    own = alias.DIRECTORY / "kt_kernel/__init__.py"
    assert (done.returncode, done.stdout) == (0, f"{own}\n"), done.stderr


def test_install_works_here_and_for_children(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(os.environ, "PYTHONPATH", f"/somewhere{os.pathsep}{alias.DIRECTORY}")
    monkeypatch.delenv("KTCONV_KT_ALIAS", raising=False)
    before = set(sys.modules)
    try:
        alias.install()
        alias.install()
        import kt_kernel  # type: ignore[import-not-found]

        assert kt_kernel.KTMoEWrapper is KTMoEWrapper
        assert set(kt_kernel.__all__) == NAMES
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("kt_kernel"):
                del sys.modules[name]
    assert os.environ["PYTHONPATH"] == f"{alias.DIRECTORY}{os.pathsep}/somewhere"
    assert sys.path.count(str(alias.DIRECTORY)) == 1
    assert capsys.readouterr().err.count(LINE) == 1


def test_names_that_are_not_here_say_so_however_they_are_used() -> None:
    from ktconv.compat.kt.sft_names import ABSENT

    absent: Any = ABSENT["KTMoELayerWrapper"]
    words = "ktconv has no kt_kernel.sft.KTMoELayerWrapper"
    with pytest.raises(UsageError, match=words):
        absent(1, key=2)
    with pytest.raises(UsageError, match=words):
        new_class("Own", (absent,))
    with pytest.raises(AttributeError, match=f"{words}: train with ktconv.train"):
        absent.from_pretrained("MODEL")
    assert not isinstance(copy(absent), absent) and not issubclass(int, absent)


def test_install_after_another_kt_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("kt_kernel")
    other.__file__ = "/opt/kt_kernel/__init__.py"
    monkeypatch.setitem(sys.modules, "kt_kernel", other)
    with pytest.raises(UsageError, match="imported already, from /opt/kt_kernel"):
        alias.install()


def used(source: str) -> set[str]:
    """Attributes that a program uses on what it calls wrapper or KTMoEWrapper."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and _is_wrapper(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            asks = node.func.id in ("getattr", "hasattr") and isinstance(name, ast.Constant)
            if asks and _is_wrapper(node.args[0]) and isinstance(name, ast.Constant):
                found.add(str(name.value))
    return found


def _is_wrapper(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "wrapper"
    return isinstance(node, ast.Name) and node.id in ("wrapper", "KTMoEWrapper")


def test_the_scan_finds_what_is_used() -> None:
    source = """
self.wrapper.first(); method.wrapper.second.third; wrapper.fourth = 1
KTMoEWrapper.fifth(2); getattr(method.wrapper, "sixth", None); hasattr(wrapper, "seventh")
other.eighth; getattr(wrapper, name)
"""
    assert used(source) == {"first", "second", "fourth", "fifth", "sixth", "seventh"}


def test_all_that_sglang_uses_is_there() -> None:
    wrapper = SFTWrapper.__init__.__code__.co_names + KTMoEWrapper.__init__.__code__.co_names
    for name in ON_WRAPPERS:
        assert hasattr(SFTWrapper, name) or name in wrapper, name


def sources_of_sglang() -> list[str]:
    """The installed program's files that name kt_kernel. Without it the test is skipped."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("sglang is not installed: only the names recorded here are checked")
    root = Path(found.submodule_search_locations[0])
    texts = (one.read_text(errors="ignore") for one in root.rglob("*.py"))
    return [text for text in texts if "kt_kernel" in text]


def test_the_recorded_names_are_those_of_the_installed_sglang() -> None:
    names = set().union(*map(used, sources_of_sglang()))
    assert names - ON_WRAPPERS - OPTIONAL - OTHERS == set()


# Modules that sglang-kt imports to check adapters of DeepSeek-V4-Flash: docs/kt-wrapper.md.
ABSENT_MODULES = {"kt_kernel.sft.deepseek_v4", "kt_kernel.sft.export_dsv4_sglang_adapter"}


def imported(source: str) -> set[tuple[str, str]]:
    """Modules of kt_kernel, and the names that a program imports from each."""
    froms = (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.ImportFrom))
    pairs = {(str(one.module), alias.name) for one in froms for alias in one.names}
    return {(module, name) for module, name in pairs if module.split(".")[0] == "kt_kernel"}


def test_the_scan_finds_what_is_imported() -> None:
    source = """
from kt_kernel.sft import first, second as third
if True:
    from kt_kernel import fourth
from other.kt_kernel import fifth
"""
    found = {("kt_kernel.sft", "first"), ("kt_kernel.sft", "second"), ("kt_kernel", "fourth")}
    assert imported(source) == found


def test_all_that_the_installed_sglang_imports_is_there() -> None:
    names = set().union(*map(imported, sources_of_sglang()))
    known = {
        "kt_kernel": NAMES,
        "kt_kernel.sft": {"AMXSFTMoEWrapper", *sft_names.OFFERED, *sft_names.ABSENT},
    }
    missing = {one for one in names if one[1] not in known.get(one[0], ())}
    assert {module for module, _ in missing} <= ABSENT_MODULES
