"""Loading through transformers: no code of a checkpoint runs, and nobody is asked.

Checkpoints here come with code planted in every place that is known to make transformers, or what
it calls, run or unpickle something. stdin says yes to every question.
"""

from __future__ import annotations

import ast
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from logging import LogRecord, getLogger, getLogRecordFactory
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.amx import Emulator
from helpers.convert import convert
from helpers.parsed import nodes
from helpers.paths import EVAL, EXAMPLE

from ktconv.cli.app import app
from ktconv.errors import CheckpointError, ResourceError
from ktconv.model import load
from ktconv.model.guard import RefusedError, no_code_of

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.process]

SOURCES = Path(load.__file__).parents[1]
ROOM = "model/load.py"

CODE = """
from pathlib import Path
Path(__file__).parent.joinpath("ran").touch()
from transformers import AutoTokenizer, LlamaConfig as Config, LlamaForCausalLM as Model
Tokenizer = AutoTokenizer
def generate(*_, **__):
    pass
"""


class Opened:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """The example with code beside it, which nothing names yet."""
    directory = tmp_path / "planted"
    shutil.copytree(EXAMPLE, directory)
    (directory / "evil.py").write_text(CODE)
    return directory


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


def has_run(directory: Path) -> bool:
    return any(directory.rglob("ran")) or any(name.endswith("evil") for name in sys.modules)


@pytest.fixture(autouse=True)
def yes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every question is answered with y, and noted."""
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    yield asked
    assert not asked


# ---- what a checkpoint can name --------------------------------------------------------


def own_architecture(directory: Path) -> None:
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change(directory / "config.json", model_type="evil_moe", auto_map=auto_map)


def own_model(directory: Path) -> None:
    """A config that transformers has, but no language model for it."""
    change(
        directory / "config.json", model_type="vit", auto_map={"AutoModelForCausalLM": "evil.Model"}
    )


def own_tokenizer(directory: Path) -> None:
    change(directory / "config.json", model_type="jetmoe")  # which has no tokenizer of its own
    change(
        directory / "tokenizer_config.json",
        tokenizer_class="EvilTokenizer",
        auto_map={"AutoTokenizer": ["evil.Tokenizer", None]},
    )


def class_in_quantization(directory: Path) -> None:
    """compressed-tensors takes FILE.py:CLASS for the name of a class."""
    group = {"type": f"{directory}/evil.py:Model", "apply": []}
    quantization = {
        "quant_method": "compressed-tensors",
        "transform_config": {"config_groups": {"all": group}},
    }
    change(directory / "config.json", quantization_config=quantization)


NEEDING = [own_architecture, own_model, own_tokenizer, class_in_quantization]


@pytest.mark.parametrize("plant", NEEDING)
def test_checkpoints_that_need_their_code_are_refused(
    plant: Callable[[Path], None], torch: Any, planted: Path
) -> None:
    plant(planted)
    with pytest.raises(load.NeedsOwnCode, match="planted needs its own Python code") as caught:
        load.load_tokenizer(planted)
        load.load_language_model(planted, "auto")
    assert "trust_remote_code=True" not in str(caught.value)  # as transformers advises
    assert not has_run(planted)


def test_a_family_that_this_release_does_not_have(torch: Any, planted: Path) -> None:
    import transformers

    change(planted / "config.json", model_type="of_tomorrow")
    says = f"planted is of type of_tomorrow, which transformers {transformers.__version__} does not"
    with pytest.raises(CheckpointError, match=says) as caught:
        load.check_language_model(planted)
    assert caught.value.hint == "use a release of transformers that supports it"


def test_no_tokenizer(torch: Any, planted: Path) -> None:
    """transformers makes up one without words, in which no text has a token."""
    for path in planted.glob("token*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="planted has no tokenizer"):
        load.load_tokenizer(planted)


def test_settings_of_a_tokenizer_without_its_words(torch: Any, planted: Path) -> None:
    (planted / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="planted has no tokenizer") as caught:
        load.load_tokenizer(planted)
    assert "tokenizer.json" in str(caught.value.hint)


def test_settings_of_generation_that_transformers_refuses(torch: Any, planted: Path) -> None:
    change(planted / "generation_config.json", pad_token_id="x")
    with pytest.raises(CheckpointError, match=r"cannot load .*generation_config\.json"):
        load.read_generation_config(planted)


def native_architecture(directory: Path) -> None:
    """As DeepSeek-V3: code lies beside it, and transformers has the architecture itself."""
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change(directory / "config.json", auto_map=auto_map)


def native_tokenizer(directory: Path) -> None:
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    change(directory / "tokenizer_config.json", auto_map=auto_map)


def own_generation(directory: Path) -> None:
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate/generate.py").write_text(CODE)
    change(directory / "generation_config.json", custom_generate=str(directory))


def pickled_weights(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Opened(directory / "ran")))


def kernel_of_the_hub(directory: Path) -> None:
    change(directory / "config.json", attn_implementation="evil/kernel")


@pytest.mark.parametrize(
    "plant",
    [native_architecture, native_tokenizer, own_generation, pickled_weights, kernel_of_the_hub],
)
def test_code_that_is_not_needed_lies_still(
    plant: Callable[[Path], None], torch: Any, planted: Path
) -> None:
    plant(planted)
    tokenizer, model = load.load_tokenizer(planted), load.load_language_model(planted, "auto")
    ids = tokenizer("The memory", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] == ids.shape[1] + 2
    assert not has_run(planted)


@pytest.mark.parametrize(
    "kind", ["AutoModelForCausalLM", "AutoConfig", "AutoProcessor", "BertModel", "LlamaConfig"]
)
def test_a_tokenizer_class_that_is_none(kind: str, torch: Any, planted: Path) -> None:
    """transformers takes any class of its own for a tokenizer, and loads it with its defaults."""
    pickled_weights(planted)
    for name in ("config.json", "processor_config.json", "preprocessor_config.json"):
        kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoProcessor", "AutoTokenizer")
        change(planted / name, auto_map=dict.fromkeys(kinds, "evil.Model"))
    change(planted / "tokenizer_config.json", tokenizer_class=kind)
    for shard in planted.glob("*.safetensors*"):
        shard.unlink()
    with pytest.raises(CheckpointError):
        load.load_tokenizer(planted)
    assert not has_run(planted)


def test_an_index_that_names_a_pickle(torch: Any, planted: Path) -> None:
    pickled_weights(planted)
    index = planted / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    change(index, weight_map=dict.fromkeys(weight_map, "pytorch_model.bin"))
    with pytest.raises(CheckpointError):
        load.load_language_model(planted, "auto")
    assert not has_run(planted)


@pytest.mark.parametrize("name", ["adapter_config.json", "config.json"])
def test_files_that_stand_for_others(name: str, torch: Any, planted: Path) -> None:
    change(planted / name, configuration_files=["config.4.0.0.json"])
    with pytest.raises(CheckpointError, match=r"an adapter|other configuration files"):
        load.load_config(planted)


def test_sections_keep_no_code(torch: Any, tmp_path: Path) -> None:
    """transformers builds the models of sections without trust_remote_code."""
    section = {"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}
    section["attn_implementation"] = "evil/kernel"
    change(tmp_path / "config.json", model_type="llava", text_config=section)
    found = load.load_config(tmp_path).text_config
    assert not hasattr(found, "auto_map")
    assert found._attn_implementation is None


def test_what_libraries_log_commands_no_terminal(
    torch: Any, planted: Path, monkeypatch: pytest.MonkeyPatch, logged: list[LogRecord]
) -> None:
    from transformers import AutoConfig

    def load_and_warn(directory: Path, **_: Any) -> Any:
        getLogger("library").warning("unknown key %s", "a\x1b[31m\r\nError: forged\u202e")
        raise ValueError("enough")

    monkeypatch.setattr(AutoConfig, "from_pretrained", load_and_warn)
    before = getLogRecordFactory()
    with pytest.raises(CheckpointError, match="enough"):
        load.load_config(planted)
    shown = r"unknown key a\u001b[31m\u000d" + "\n" + r"    Error: forged\u202e"
    assert [record.getMessage() for record in logged] == [shown]
    assert getLogRecordFactory() is before


def test_keys_that_are_no_names_are_dropped(torch: Any, planted: Path) -> None:
    """llm-compressor writes keys of config.json into Python source: see test_gptq."""
    key = "a=__import__('pathlib').Path('ran').touch(),b"
    change(planted / "config.json", **{key: 1, "transformers.js_config": {}, "one_more": 2})
    found = load.load_config(planted).to_dict()
    assert all(name.isidentifier() for name in found)
    assert found["one_more"] == 2


def test_errors_of_libraries_become_sentences(torch: Any, planted: Path) -> None:
    """Of whatever class they are."""
    change(planted / "tokenizer_config.json", auto_map=7)
    with pytest.raises(CheckpointError, match="transformers cannot load the tokenizer of"):
        load.load_tokenizer(planted)
    change(planted / "config.json", auto_map=7)
    with pytest.raises(CheckpointError, match="transformers cannot load"):
        load.load_config(planted)


def test_memory_that_ends_is_no_fault_of_the_checkpoint(
    torch: Any, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ResourceError, match=r"out of memory while loading .*planted"):
        load.load_language_model(planted, "auto")


# ---- the commands ----------------------------------------------------------------------

WORDS = {
    "verify": ["verify", "cpu", "--source", "MODEL", "--threads", "1"],
    "verify --level model": ["verify", "cpu", "--source", "MODEL", "--level", "model"],
    "stats": ["stats", "MODEL", "--max-tokens", "32"],
    "gptq": ["quantize-gpu", "MODEL", "new", "--method", "gptq", "--dataset", str(EVAL)],
}
WAYS_OUT = {
    "verify --level model": "run --level layers",
    "stats": "use a release of transformers",
    "gptq": "--algorithm rtn works on the checkpoint itself",
}


@pytest.mark.parametrize("command", WORDS)
def test_commands_never_ask(
    command: str, torch: Any, planted: Path, tmp_path: Path, tiles: Emulator | None
) -> None:
    """With y on stdin: one sentence, or random hidden states."""
    if command == "gptq" and find_spec("llmcompressor") is None:
        pytest.skip("llmcompressor is not installed")
    own_architecture(planted)
    places = {"MODEL": planted, "cpu": tmp_path / "cpu", "new": tmp_path / "new"}
    if command.startswith("verify"):
        convert(planted, places["cpu"])
    words = [places.get(word, word) for word in WORDS[command]]
    done = CliRunner().invoke(app, [str(word) for word in words], input="y\n" * 100)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    why = "needs its own Python code (auto_map in config.json), and ktconv does not run code"
    assert why in done.stderr + done.stdout
    assert "[y/N]" not in done.stderr + done.stdout
    if command in WAYS_OUT:
        assert (done.exit_code, done.stderr.count("Error:")) == (2, 1), done.stderr
        assert WAYS_OUT[command] in done.stderr
    else:
        assert done.exit_code == 0, done.stderr
        assert "random hidden states" in done.stdout + done.stderr
    assert not has_run(planted)


@pytest.mark.parametrize(
    ("command", "lever"),
    [("verify --level model", "run --level layers"), ("stats", "shorter windows of text")],
)
def test_too_little_memory_names_the_lever_of_the_command(
    command: str, lever: str, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.system import machine

    monkeypatch.chdir(tmp_path)
    convert(EXAMPLE, tmp_path / "cpu")
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    words = [str(EXAMPLE) if word == "MODEL" else word for word in WORDS[command]]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 3
    assert lever in done.stderr.partition("Hint:")[2]


# ---- the second lock -------------------------------------------------------------------


def runs(path: Path) -> None:
    exec(compile(path.read_text(), path, "exec"), {"__file__": str(path)})


def imports(path: Path) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("evil", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))


def starts(path: Path) -> None:
    subprocess.run([sys.executable, str(path)], check=True)


def starts_by_shell(path: Path) -> None:
    subprocess.run(f"{sys.executable} {path}", shell=True, check=True)


def unpickles(path: Path) -> None:
    bad = path.with_suffix(".pkl")
    bad.write_bytes(pickle.dumps(Opened(path.with_name("ran"))))
    with bad.open("rb") as file:
        pickle.load(file)


@pytest.mark.parametrize("act", [runs, imports, starts, starts_by_shell, unpickles])
def test_files_of_a_guarded_directory_do_not_run(
    act: Callable[[Path], None], planted: Path
) -> None:
    with pytest.raises(RefusedError), no_code_of(planted):
        act(planted / "evil.py")
    assert not has_run(planted)


def test_links_to_files_elsewhere_do_not_run_either(planted: Path, tmp_path: Path) -> None:
    """As snapshots of the hub hold them."""
    code = tmp_path / "blob"
    (planted / "evil.py").rename(code)
    (planted / "evil.py").symlink_to(code)
    (tmp_path / "other").symlink_to(planted)
    with no_code_of(tmp_path / "other"):
        for path in (
            planted / "evil.py",
            tmp_path / "other/evil.py",
            planted / "../planted/evil.py",
        ):
            with pytest.raises(RefusedError):
                runs(path)
    assert not has_run(planted)


def test_nobody_is_asked_meanwhile(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real input
    with pytest.raises(RefusedError), no_code_of(planted):
        input()


def test_all_else_goes_on(planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fine.py").write_text("")
    monkeypatch.chdir(planted)  # where source without a file seems to lie
    with no_code_of(planted), no_code_of(planted):
        assert (planted / "config.json").read_text()
        exec("assert True")
        runs(tmp_path / "fine.py")
    runs(planted / "evil.py")
    assert has_run(planted)


# ---- the only place --------------------------------------------------------------------

LOADING = {"from_pretrained", "from_config", "trust_remote_code", "load_custom_generate"}
RUNNING = {"eval", "exec", "__import__"}
MODULES = {
    "pickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "imp",
    "runpy",
}
READING = {"torch.load", "pickle.load", "pickle.loads", "yaml.load", "torch.hub"}
LAST = {name.rpartition(".")[2] for name in READING}


def risks(code: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """What in a module's code loads, runs or unpickles something, with its line."""
    for node in code:
        for name in names_in(node):
            if name in LOADING or (name.startswith("Auto") and name[4:5].isupper()):
                yield getattr(node, "lineno", 0), name
        if isinstance(node, ast.Name) and node.id in RUNNING:
            yield node.lineno, node.id
        if isinstance(node, ast.Attribute) and node.attr in LAST and ast.unparse(node) in READING:
            yield node.lineno, ast.unparse(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None), *(one.name for one in node.names)]
            for module in filter(None, modules):
                if module.partition(".")[0] in MODULES:
                    yield node.lineno, module


def names_in(node: ast.AST) -> list[str]:
    """Identifiers in a node, and strings, by which getattr would find them."""
    found = [getattr(node, name, None) for name in ("attr", "id", "arg", "name", "value")]
    return [name for name in found if isinstance(name, str)]


def test_nothing_else_loads_anything() -> None:
    found = {
        f"{path.relative_to(SOURCES)}:{line}: {name}"
        for path in sorted(SOURCES.rglob("*.py"))
        if str(path.relative_to(SOURCES)) != ROOM
        for line, name in risks(nodes(path))
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "from transformers import AutoTokenizer",
        "model.from_pretrained(x)",
        "load(x, trust_remote_code=True)",
        "getattr(transformers, 'from_pretrained')(x)",
        "torch.load(x)",
        "import pickle",
        "from pickle import loads",
        "exec(x)",
    ],
)
def test_the_search_finds_what_it_should(line: str) -> None:
    assert list(risks(ast.walk(ast.parse(line))))


def test_the_only_place_always_says_no() -> None:
    """Every call of from_pretrained there passes what keeps code out."""
    calls = [
        node
        for node in nodes(SOURCES / ROOM)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
    ]
    assert len(calls) == 4
    for call in calls:
        unpacked = [one.value for one in call.keywords if one.arg is None]
        assert "_SAFE" in [one.id for one in unpacked if isinstance(one, ast.Name)]
    assert load._SAFE["trust_remote_code"] is False and load._SAFE["local_files_only"] is True
