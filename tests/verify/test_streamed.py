"""Level model on models that are never loaded: the same figures, wherever a run was interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import ktconv_done
from helpers.convert import convert
from helpers.gpu import quantize
from helpers.paths import EVAL, EXAMPLE, MODELS
from msgspec.structs import replace

from ktconv.errors import CheckpointError, MemoryShortError, ResourceError, UsageError
from ktconv.system import machine
from ktconv.verify import VerifyRequest, prepare, verify
from ktconv.verify import model as model_level
from ktconv.verify.text import LAYERS_SHOWN, lines_of

pytestmark = [pytest.mark.slow, pytest.mark.torch]

pytest.importorskip("transformers")
FIGURES = (
    *("perplexity_source", "perplexity_converted", "perplexity_increase"),
    *("kl_mean", "kl_p99", "top1_agreement", "tokens", "windows"),
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """Conversions of a model, each made once."""
    made: dict[tuple[Path, str], Path] = {}

    def get(source: Path, method: str) -> Path:
        if (source, method) not in made:
            output = made[source, method] = tmp_path_factory.mktemp("streamed") / method
            if method == "W4A16":
                quantize(source, output, scheme=method)
            elif method.startswith("gguf-"):
                ktconv_done("quantize-cpu", source, output, "--method", method)
            else:
                convert(source, output, method=method)
        return made[source, method]

    return get


@pytest.fixture
def request_for(
    outputs: Callable[[Path, str], Path], tmp_path: Path
) -> Callable[..., VerifyRequest]:
    def get(source: Path = EXAMPLE, method: str = "int8", **options: Any) -> VerifyRequest:
        text = source / "eval.txt" if source != EXAMPLE else EVAL
        given: dict[str, Any] = {"threads": 1, "windows": 2, "sample": 1e-9, "tokens": 1}
        given |= {"text": text, "work_dir": tmp_path / "work"} | options
        return VerifyRequest(outputs(source, method), str(source), "model", **given)

    return get


@pytest.fixture
def nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model can be loaded."""
    monkeypatch.setattr(model_level, "level_model_bytes", lambda *_: 1 << 60)


@pytest.fixture(autouse=True)
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of generated text, which is the same code for any number of tokens."""
    monkeypatch.setattr(model_level, "NEW_TOKENS", 3)


def not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the model's layers shared more than their outputs."""
    from ktconv.model.streamed import cut
    from ktconv.model.streamed.parts import NotCut

    def refuse(self: Any, *_: object) -> None:
        raise NotCut(self.name, "layer 1 depends on more than the layer before it")

    monkeypatch.setattr(cut.CutModel, "check", refuse)


def figures(facts: Any) -> dict[str, Any]:
    return {name: facts["model"][name] for name in FIGURES}


# ---- figures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "method"),
    [
        (EXAMPLE, "int4"),
        (EXAMPLE, "W4A16"),
        (EXAMPLE, "gguf-q4_0"),
        (MODELS / "tiny-qwen3moe", "int8"),
        (MODELS / "tiny-deepseekv3", "int4"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_pass_finds_what_loaded_models_say(
    source: Path,
    method: str,
    request_for: Callable[..., VerifyRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last digit, whether each window waits for experts or is run twice."""
    if not source.is_dir():
        pytest.skip("the trained models are not here")
    if method == "W4A16":
        from ktconv.verify.encoded.output import EncodedOutput

        monkeypatch.setattr(EncodedOutput, "is_partial", True)  # else compressed-tensors unpacks it
    request = request_for(source, method, windows=2 if source == EXAMPLE else 1)
    passed = verify(request).facts
    not_cut(monkeypatch)
    loaded = verify(request).facts
    assert figures(passed) == figures(loaded)
    assert passed["model"]["kl_mean"] > 0
    assert passed["model"]["layers"] and not loaded["model"]["layers"]
    assert passed["model"]["generation"] == loaded["model"]["generation"]
    assert any("depends on more than the layer before it" in note for note in loaded["notes"])


class Killed(BaseException):
    """As a signal does: nothing of ours catches it."""


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_run_goes_on(
    after: int, request_for: Callable[..., VerifyRequest], nothing_fits: None, tmp_path: Path
) -> None:
    """In the last windows of a layer, and of the head."""
    from ktconv.model.streamed.compare import Comparison

    whole, request = verify(request_for()).facts, request_for(work_dir=tmp_path / "other")
    seen: list[tuple[int, int]] = []
    layer = Comparison.layer

    def killed(self: Any, *_: Any) -> None:
        raise Killed

    def counted(self: Any, index: int, window: int, values: Any) -> None:
        if (index, window) == (after + 1, 1):
            raise Killed
        layer(self, index, window, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comparison, "layer", counted)
        if after:
            patch.setattr(Comparison, "logits", killed)
        with pytest.raises(Killed):
            verify(request)
    assert len(list((tmp_path / "other").iterdir())) == 1

    def noted(self: Any, index: int, window: int, values: Any) -> None:
        seen.append((index, window))
        layer(self, index, window, values)

    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comparison, "layer", noted)
        facts = verify(request, notify=lines.append).facts
    assert f"continuing behind layer {after}" in lines
    assert seen == [(index, window) for index in range(after + 1, 2) for window in range(2)]
    assert facts["model"] == whole["model"]
    assert not list((tmp_path / "other").iterdir())


def test_another_output_does_not_go_on(
    request_for: Callable[..., VerifyRequest], nothing_fits: None, tmp_path: Path
) -> None:
    """The state of one conversion's hidden states says nothing of another's."""
    from ktconv.model.streamed.compare import Comparison

    def killed(self: Any, *_: Any) -> None:
        raise Killed

    request, lines = request_for(method="int8"), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comparison, "logits", killed)
        with pytest.raises(Killed):
            verify(request)
    verify(request_for(method="int4"), notify=lines.append)
    assert not any("continuing" in line for line in lines)
    verify(request, notify=lines.append)
    assert any("continuing" in line for line in lines)


# ---- what fits into memory ---------------------------------------------------------------


def test_text_is_written_only_where_models_fit(
    request_for: Callable[..., VerifyRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for()
    whole = verify(request).facts
    assert whole["model"]["generation"]["source"]
    monkeypatch.setattr(model_level, "level_model_bytes", lambda *_: 1 << 60)
    result = verify(request)
    assert result.facts["model"]["generation"] is None
    assert figures(result.facts) == figures(whole)
    assert any("no text was generated, because loading" in one for one in result.facts["notes"])
    assert not any("output:" in line for line in lines_of(result))


def test_experts_that_are_unlike_only_when_loaded(
    request_for: Callable[..., VerifyRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That fails, and is not just a reason why no text is written."""
    from ktconv.model.matching import UnlikeExperts

    def unlike(*_: Any, **__: Any) -> Any:
        raise UnlikeExperts("the experts of layer 1 are not those of the model")

    monkeypatch.setattr("ktconv.model.replace_experts", unlike, raising=False)
    result = verify(request_for())
    assert [one.check for one in result.failures] == ["experts"]


@pytest.mark.parametrize("below", ["", "work"])
def test_states_are_not_kept_beside_what_is_compared(
    request_for: Callable[..., VerifyRequest], below: str
) -> None:
    request = request_for()
    for place in (request.output, EXAMPLE):
        words = f"--work-dir .* cannot be used: it is in {place}"
        with pytest.raises(UsageError, match=words):
            verify(replace(request, work_dir=place / below))
        assert not (place / "work").exists()


def test_neither_layer_by_layer_nor_whole(
    request_for: Callable[..., VerifyRequest], nothing_fits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_cut(monkeypatch)
    words = r"cannot be run layer by layer: .* before it, and loading the source model needs about"
    with pytest.raises(MemoryShortError, match=words) as caught:
        verify(request_for())
    assert caught.value.hint == model_level.MORE_MEMORY


def test_max_memory_holds_for_what_is_loaded(
    request_for: Callable[..., VerifyRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_level, "level_model_bytes", lambda *_: 2 << 30)
    limit = machine.resident_memory() + (1536 << 20)
    ready = prepare(request_for(max_memory=limit))
    assert ready.model is not None and ready.model.memory <= ready.budget.peak <= limit
    facts = verify(request_for(), prepared=ready).facts
    (note,) = (note for note in facts["notes"] if "no text was generated" in note)
    assert "may be used (--max-memory)" in note


def test_the_plan_is_told(request_for: Callable[..., VerifyRequest], tmp_path: Path) -> None:
    ready = prepare(request_for())
    assert ready.model is not None
    (line,) = ready.model.lines
    assert line.startswith("level model: reads ") and f"{tmp_path}/work" in line
    assert not (tmp_path / "work").exists()  # nothing is written before it runs


# ---- models and texts that cannot be read ------------------------------------------------


def copied(tmp_path: Path, *without: str, **config: Any) -> Path:
    """The example without some files, and with another config.json."""
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns(*without))
    content = json.loads((source / "config.json").read_text()) | config
    (source / "config.json").write_text(json.dumps(content))
    return source


def test_no_tokenizer(request_for: Callable[..., VerifyRequest], tmp_path: Path) -> None:
    source = copied(tmp_path, "token*", "vocab*", "merges*", "special*")
    with pytest.raises(CheckpointError, match="source has no tokenizer") as caught:
        prepare(replace(request_for(), source=str(source)))
    assert "tokenizer.json" in str(caught.value.hint)


def test_a_text_without_tokens(request_for: Callable[..., VerifyRequest], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a")
    with pytest.raises(UsageError, match="less than two tokens"):
        prepare(request_for(text=text))


def test_a_family_that_transformers_does_not_have(
    request_for: Callable[..., VerifyRequest], tmp_path: Path
) -> None:
    import transformers

    source = copied(tmp_path, model_type="qwen3_moe_of_tomorrow", architectures=["Qwen3Moe"])
    release = transformers.__version__
    with pytest.raises(CheckpointError, match=f"transformers {release} does not have") as caught:
        prepare(replace(request_for(), source=str(source)))
    assert caught.value.hint == "use a release of transformers that supports it"


def test_a_full_disk(
    request_for: Callable[..., VerifyRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "disk_free", lambda _: 1 << 10)
    with pytest.raises(ResourceError, match="of hidden states") as caught:
        prepare(request_for())
    assert "--work-dir" in str(caught.value.hint)


# ---- lines -----------------------------------------------------------------------------


def test_many_layers_are_shown_in_part(request_for: Callable[..., VerifyRequest]) -> None:
    """The worst, the one that adds most, every nth, and the last."""
    result = verify(request_for())
    rows = [
        {"layer": n, "relative_error": n / 1000, "token_error": n / 1000, "cosine": 1 - n / 1e5}
        for n in range(60)
    ]
    for row in rows[43:]:
        row["token_error"] += 0.1
    rows[51]["token_error"] += 0.05
    facts = {**result.facts, "model": {**result.facts["model"], "layers": rows}}
    lines = [line.strip() for line in lines_of(replace(result, facts=facts))]
    shown = [line for line in lines if line.startswith("layer ")]
    assert len(shown) <= LAYERS_SHOWN + 2
    assert [line.split()[1] for line in shown if line.endswith("worst")] == ["51"]
    assert [line.split()[1] for line in shown if line.endswith("adds most")] == ["43"]
    assert shown[0].split()[1] == "0" and shown[-1].split()[1] == "59"
    assert any(line == "layer  43  0.0430  0.1430  0.999570  adds most" for line in shown)
