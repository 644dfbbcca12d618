"""For all tests: levels of instruction sets, AMX where the CPU has none, missing packages."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import threadpoolctl
from helpers import family_models
from helpers.amx import EMULATOR, Emulator, kept_directory, load_emulator
from helpers.disk_calls import Commands
from helpers.levels import at_level
from helpers.paths import EXAMPLE

from ktconv import native
from ktconv.cli import options
from ktconv.system.pool import Pool
from ktconv.verify import model as model_level

MEMORY = "/dev/shm"  # where Linux keeps files in memory
# What `pip install .[check]` leaves out. Tests that come upon one that is missing are skipped.
OPTIONAL = {
    "accelerate", "aiohttp", "compressed_tensors", "datasets", "fsspec", "gcsfs", "greenlet",
    "huggingface_hub", "llmcompressor", "matplotlib", "moto", "peft", "ray", "s3fs", "tenacity",
    "torch", "transformers",
}  # fmt: skip
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
MANY_MODULES = 100
SLOW = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    # Scripts in the background and nohup ignore signals, and so would every process of a test.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Conversions wait for their disk more than they compute. What matters is that and when they
    # sync, which tests find by hooks: the files may be in memory.
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    # The models here are tiny: PyTorch's threads would wait for one another, and take what other
    # processes of tests need. Set before PyTorch is loaded, here and in programs that tests start.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of tests that want several
    threadpoolctl.threadpool_limits(1)  # of NumPy, which is loaded already
    # Arrays of some hundred KB are asked for and freed all the time: their pages are kept.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # of glibc
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(option, 256 << 20)
    # Else programs of tests compile all modules of the package again, each time, and pytest all
    # files of tests, whose assertions it rewrites: half of the time of a collection.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2:
        config.pluginmanager.register(Backwards())
    config.stash[EMULATOR] = load_emulator(kept_directory(config))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Behind pytest's faulthandler, which takes SIGILL for itself when it is configured."""
    emulator = session.config.stash[EMULATOR]
    if emulator is not None:
        emulator.install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of slow tests are not imported, and PyTorch with them, where none is asked for."""
    words = str(config.option.markexpr)
    if collection_path.suffix != ".py" or not words.startswith("not slow") or " or " in words:
        return None
    return True if SLOW.search(collection_path.read_text("utf-8")) else None


class Backwards:
    """Every other process of a run begins with the last file: it meets the others halfway, and
    takes from there what they have compiled."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if isinstance(collector, pytest.Directory):
            report.result.reverse()
        return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All processes of a run must have the same tests in the same order."""
    items.sort(key=lambda item: item.path.parts)


def missing(error: BaseException | None) -> str | None:
    """The optional package whose absence an error comes from."""
    while error is not None:
        root = str(getattr(error, "name", None)).partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and root in OPTIONAL and find_spec(root) is None:
            return root
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call: pytest.CallInfo[Any] | None = vars(report).get("call")  # pytest's, of a file that fails
    name = missing(call.excinfo.value) if report.failed and call and call.excinfo else None
    if name is not None:
        skipped = str(collector.path), 0, f"Skipped: {name} is not installed"
        return pytest.CollectReport(report.nodeid, "skipped", skipped, [])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    name = missing(call.excinfo.value) if report.failed and call.excinfo else None
    if name is not None:
        report.outcome = "skipped"
        report.longrepr = str(item.path), item.location[1] or 0, f"Skipped: {name} is not installed"
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """PyTorch keeps one thread: with more, which wait for the other process's, all later tests of
    this one take several times as long."""
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads") and (left := torch.get_num_threads()) != 1:
        torch.set_num_threads(1)
        pytest.fail(f"the test leaves PyTorch with {left} threads", pytrace=False)


_frozen = 0  # modules when objects were last frozen


def pytest_collection_finish() -> None:
    freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    spare_work()
    if len(sys.modules) - _frozen > MANY_MODULES:  # as transformers, which a test imported
        freeze()


def spare_work() -> None:
    """Leave out what no test looks at, once the modules are there that do it."""
    transformers: Any = sys.modules.get("transformers.configuration_utils")
    if hasattr(transformers, "PreTrainedConfig"):
        # Its text, which takes as long as a model, is made for a line of a log that nobody shows.
        transformers.PreTrainedConfig.__repr__ = object.__repr__
    peft: Any = sys.modules.get("peft")
    if hasattr(peft, "PeftModel"):
        # A page about each adapter, whose template takes longer to compile than all else to save.
        peft.PeftModel.create_or_update_model_card = lambda *_: None
    plan: Any = sys.modules.get("ktconv.model.streamed.plan")
    if hasattr(plan, "MEASURED_SECONDS"):
        plan.MEASURED_SECONDS = 0.005  # tests judge no times


def freeze() -> None:
    """Else each full collection visits all tests and PyTorch's modules. Others are rarer: what
    tests wait for they collect themselves."""
    global _frozen
    _frozen = len(sys.modules)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for what commands keep in the user's cache. The fixture also sets all else that
    holds for every test: each fixture of its own would be asked for 20 000 times."""
    path = tmp_path_factory.mktemp("cache")
    # The processes of a run share the checkpoints that transformers writes.
    base = tmp_path_factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "families"
    kept.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path))
        patch.setattr(family_models, "kept", kept)
        # Level model lets models write a text, which takes longer than all it measures.
        patch.setattr(model_level, "NEW_TOKENS", 4)
        # Commands, whose process ends with them, let no collection of garbage visit what is there
        # when they begin: this one would keep the models of all tests.
        patch.setattr(options, "gc", SimpleNamespace(freeze=lambda: None))
        yield path


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """All that is logged from here on at the level of its logger, warnings if it has none."""
    kept = Records()
    logging.getLogger().addHandler(kept)
    yield kept.records
    logging.getLogger().removeHandler(kept)


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch, where transformers is installed too."""
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level layers on random hidden states: loading transformers takes ten times as long."""
    monkeypatch.setattr("ktconv.verify.hidden_states.find_spec", lambda name: None)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two threads of the kernels."""
    with Pool(2) as made:
        yield made


@pytest.fixture(scope="session")
def converted_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The example model converted with these options; nobody may change it."""
    from helpers.convert import convert

    made: dict[str, Path] = {}

    def get(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("example") / "out"
            convert(EXAMPLE, made[key], **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Commands in processes of their own, which one interpreter of this run is forked for."""
    server = Commands(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config) -> Emulator:
    """The emulator of AMX; skips where the CPU has AMX itself or nothing can emulate it."""
    found = pytestconfig.stash[EMULATOR]
    if found is None:
        pytest.skip("AMX is not emulated here")
    return found


@pytest.fixture
def tiles(pytestconfig: pytest.Config) -> Emulator | None:
    """For tests that execute AMX: sees to it that they can."""
    found = pytestconfig.stash[EMULATOR]
    if found is not None:
        found.install()
    return found


@pytest.fixture(params=list(native.ISA_NAMES.values()))
def isa(request: pytest.FixtureRequest, tiles: Emulator | None) -> Iterator[str]:
    """Each level in turn, in use during the test; one that the machine lacks is skipped."""
    level: str = request.param
    if level not in native.isa_available():
        pytest.skip(f"this machine does not support {level}")
    with at_level(level):
        yield level
