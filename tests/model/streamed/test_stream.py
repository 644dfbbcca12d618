"""`ktconv.model.stream`: what watchers see, and the example of the documentation."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import EVAL, EXAMPLE, ROOT

from ktconv.errors import SourceChangedError, UsageError
from ktconv.model import load_model, replace_experts, stream
from ktconv.model.evaluate import windows
from ktconv.model.load import load_tokenizer
from ktconv.system.arrays import Array

pytestmark = [pytest.mark.slow, pytest.mark.torch]


class Kept:
    """A watcher that keeps what it sees."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], list[Any]] = {}
        self.said: dict[int, list[Any]] = {}

    def layer(self, index: int, window: int, values: Any) -> None:
        assert (index, window) not in self.values
        self.values[index, window] = list(values)

    def logits(self, window: int, logits: Any) -> None:
        self.said[window] = list(logits)

    def state(self) -> dict[str, Array]:
        return {}

    def restore(self, state: Any) -> None:
        raise AssertionError("there is nothing to go on from")


@pytest.fixture
def texts(torch: Any) -> list[Any]:
    found = windows(load_tokenizer(EXAMPLE), EVAL.read_text(), 48, 3)
    return [*found[:2], found[2][:, :17]]  # windows need not have one length


def test_watchers_see_what_layers_return(
    texts: list[Any], int4: Path, torch: Any, tmp_path: Path
) -> None:
    """The same bits as in a loaded model, of both sides."""
    kept, lines = Kept(), list[str]()
    options: dict[str, Any] = {"work_dir": tmp_path / "work", "threads": 1, "notify": lines.append}
    stream(EXAMPLE, texts, output=int4, watchers=[kept], head=True, **options)
    model, _ = load_model(EXAMPLE)
    model.config._experts_implementation = "eager"
    returned: list[Any] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _args, found: returned.append(found))
    with replace_experts(model, int4, threads=1, keep=True) as replaced, torch.no_grad():
        for window, ids in enumerate(texts):
            converted = model(input_ids=ids, use_cache=False).logits
            with replaced.originals():
                source = model(input_ids=ids, use_cache=False).logits
            assert torch.equal(kept.said[window][0], source)
            assert torch.equal(kept.said[window][1], converted)
            for index in range(2):
                here, there = kept.values[index, window]
                assert torch.equal(here, returned[2 + index])
                assert torch.equal(there, returned[index])
            returned.clear()
    assert list(kept.values) == [(index, window) for index in range(2) for window in range(3)]
    assert not list((tmp_path / "work").iterdir())


def test_one_side_and_no_head(texts: list[Any], torch: Any, tmp_path: Path) -> None:
    kept = Kept()
    stream(str(EXAMPLE), texts[2:], watchers=[kept], work_dir=str(tmp_path / "work"))
    assert [len(values) for values in kept.values.values()] == [1, 1] and not kept.said
    with pytest.raises(UsageError, match="no text to read"):
        stream(EXAMPLE, [])
    with pytest.raises(UsageError, match="is not a directory"):
        stream(EXAMPLE, texts[2:], output=tmp_path / "absent", work_dir=tmp_path / "work")
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("when", ["layer", "logits"])
def test_a_source_that_changes_is_refused(
    when: str, texts: list[Any], torch: Any, tmp_path: Path
) -> None:
    """Also weights that are used where they lie: the last that is read is the head."""
    source = shutil.copytree(EXAMPLE, tmp_path / "model")

    class Changing(Kept):
        def layer(self, index: int, window: int, values: Any) -> None:
            if when == "layer":
                self.change()

        def logits(self, window: int, logits: Any) -> None:
            self.change()

        def change(self) -> None:
            for shard in source.glob("*.safetensors"):
                os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))

    with pytest.raises(SourceChangedError, match="changed while it was read"):
        stream(source, texts, watchers=[Changing()], head=True, work_dir=tmp_path / "work")


def test_the_example_of_the_documentation(
    int4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], torch: Any
) -> None:
    page = (ROOT / "docs/streaming.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    text = tmp_path / "text.txt"
    text.write_text(EVAL.read_text()[:3000])
    for name, path in (("Qwen3-30B-A3B", EXAMPLE), ("qwen3-int4", int4), ("text.txt", text)):
        assert code.count(f'"{name}"') == 1
        code = code.replace(f'"{name}"', repr(str(path)))
    exec(compile(code, "streaming.md", "exec"), {})
    *layers, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in layers] == ["0", "1"]
    assert all(0 < float(line.split()[1]) < 0.5 for line in layers)
    assert "kl_mean=0.0" in last
