"""`ktconv generate`: the text of transformers with the same weights, as it comes, and errors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import edit_json, ktconv, ktconv_done, refused, refused_in_json
from helpers.convert import Converted
from helpers.lora import sides, write_adapter
from helpers.paths import EXAMPLE

import ktconv as library
from ktconv import native
from ktconv.errors import CheckpointError, UsageError

pytestmark = [pytest.mark.slow, pytest.mark.torch]
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PROMPT = "def main("
TEMPLATE = "{% for message in messages %}Q: {{ message['content'] }}\nA:{% endfor %}"


@pytest.fixture(scope="session")
def int4(converted_example: Converted) -> Path:
    return converted_example(method="int4")


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("generate") / "fp8"
    ktconv_done("quantize-cpu", EXAMPLE, output, "--method", "fp8")
    return output


def with_template(folder: Path, template: str) -> Path:
    """The example with a chat template."""
    shutil.copytree(EXAMPLE, folder)
    edit_json(folder / "tokenizer_config.json", lambda found: found.update(chat_template=template))
    return folder


def decoded(output: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of transformers, with the weights that `output` has decoded."""
    from ktconv.model import load_model
    from ktconv.model.sites import find_experts
    from ktconv.runtime import MoELayer

    model, tokenizer = load_model(EXAMPLE)
    with torch.no_grad():
        for layer, site in find_experts(model).items():
            packed = MoELayer.load(output, layer).packed
            for expert in range(packed.count):
                views = site.own.matrices(expert).values()
                for view, one in zip(views, packed.loaded(expert), strict=True):
                    assert one is not None
                    view.copy_(torch.from_numpy(one.values()).to(view.dtype))
    return model, tokenizer


@pytest.mark.parametrize("name", ["fp8", "the model itself"])
def test_text_is_that_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    output: Path = EXAMPLE if name == "the model itself" else request.getfixturevalue(name)
    text = ktconv_done("generate", output, "--prompt", PROMPT, "--max-tokens", 24)
    model, tokenizer = decoded(output)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    found = model.generate(ids, do_sample=False, max_new_tokens=24)
    assert text == tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True) + "\n"


def test_tokens_are_likeliest_by_transformers(int4: Path) -> None:
    """Kernels of int4 round inputs to 8 bits, so that tokens of nearly the same probability can
    change places; each must be as likely as the likeliest but for that."""
    found = library.generate(int4, prompt=PROMPT, source=EXAMPLE, max_tokens=24)["tokens"]
    model, tokenizer = decoded(int4)
    ids = tokenizer(PROMPT)["input_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([ids + found])).logits[0, len(ids) - 1 : -1].float()
    behind = logits.max(dim=1).values - logits.gather(1, torch.tensor(found)[:, None])[:, 0]
    assert behind.max() < 0.5
    assert (behind == 0).sum() >= 20


def test_the_document(int4: Path) -> None:
    words = ["generate", int4, "--source", EXAMPLE, "--prompt", PROMPT, "--max-tokens", 5]
    found = json.loads(ktconv_done(*words, "--json"))
    assert found["method"] == "int4" and found["ended_by"] == "length"
    assert len(found["tokens"]) == 5 and found["prompt_tokens"] > 1
    assert found["decode_tokens_s"] == pytest.approx(1000 / found["decode_ms"])
    told = {"linear_layers": 9, "norms": 9, "routers": 2, "decoder_layers": 2}
    assert found["on_kernels"] == (told if native.dense_is_fast() else dict.fromkeys(told, 0))
    own = json.loads(ktconv_done(*words, "--json", "--outside", "transformers"))
    assert not any(own["on_kernels"].values()) and own["tokens"][0] == found["tokens"][0]
    same = library.generate(int4, prompt=PROMPT, source=EXAMPLE, max_tokens=5)
    assert same["text"] + "\n" == ktconv_done(*words) and same["tokens"] == found["tokens"]


def test_random_choices_depend_on_the_seed(int4: Path) -> None:
    def tokens(**options: Any) -> list[int]:
        found = library.generate(int4, prompt=PROMPT, source=EXAMPLE, max_tokens=8, **options)
        return list(found["tokens"])

    likeliest = tokens()
    assert tokens(temperature=5.0, seed=1) == tokens(temperature=5.0, seed=1) != likeliest
    assert tokens(temperature=5.0, seed=2) != tokens(temperature=5.0, seed=1)
    assert tokens(temperature=5.0, top_p=1e-6) == likeliest


def test_a_chat_template(int4: Path, tmp_path: Path) -> None:
    model = with_template(tmp_path / "model", TEMPLATE)

    def tokens(*words: object) -> int:
        more = ["--prompt", "abc", "--max-tokens", 1, "--json", *words]
        return int(json.loads(ktconv_done("generate", int4, *more))["prompt_tokens"])

    plain = tokens("--source", EXAMPLE)
    assert tokens("--source", model) == tokens("--source", model, "--chat") > plain
    assert tokens("--source", model, "--no-chat") == plain


@pytest.mark.parametrize("secret", ["''.__class__.__mro__", "cycler.__init__.__globals__"])
def test_templates_reach_nothing(int4: Path, tmp_path: Path, secret: str) -> None:
    model = with_template(tmp_path / "model", "{{ " + secret + "[0] }}")
    result = ktconv("generate", int4, "--source", model, "--prompt", PROMPT)
    refused(result, 2, "chat template", "cannot be rendered")


def test_the_end_of_the_text(int4: Path, tmp_path: Path) -> None:
    """The token at which the model ends is not written."""
    usual = library.generate(int4, prompt=PROMPT, source=EXAMPLE, max_tokens=8)
    end = usual["tokens"][3]
    first = usual["tokens"].index(end)
    model = shutil.copytree(EXAMPLE, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    found = library.generate(int4, prompt=PROMPT, source=model, max_tokens=8)
    assert found["ended_by"] == "end token"
    assert found["tokens"] == usual["tokens"][: first + 1]
    assert usual["text"].startswith(found["text"])


def test_a_string_at_which_text_ends(int4: Path, tmp_path: Path) -> None:
    """stop_strings of generation_config.json end a text, also across tokens; others are refused."""
    usual = library.generate(int4, prompt=PROMPT, source=EXAMPLE, max_tokens=12)["text"]
    stop = usual[len(usual) // 3 :][:3]
    model = shutil.copytree(EXAMPLE, tmp_path / "model")
    config = model / "generation_config.json"
    config.write_text(json.dumps({"stop_strings": ["not there", stop]}))
    found = library.generate(int4, prompt=PROMPT, source=model, max_tokens=12)
    assert found["ended_by"] == "stop string"
    assert stop in found["text"] != usual and usual.startswith(found["text"])
    config.write_text(json.dumps({"stop_strings": [7]}))
    with pytest.raises(CheckpointError, match=r"stop_strings.*not strings"):
        library.generate(int4, prompt=PROMPT, source=model)


def test_a_source_on_a_web_server(int4: Path) -> None:
    from helpers.web_server import serving

    with serving(EXAMPLE) as server:
        found = library.generate(int4, prompt=PROMPT, source=server.url, max_tokens=5)
    assert (
        found["text"] == library.generate(int4, prompt=PROMPT, source=EXAMPLE, max_tokens=5)["text"]
    )


def test_an_adapter_is_in_all_weights_or_in_none(int4: Path, tmp_path: Path) -> None:
    def modules(names: tuple[str, ...], rows: int) -> Path:
        pairs = {name: sides(np.random.default_rng(1), rows, 128) for name in names}
        return write_adapter(tmp_path / str(rows), pairs)

    every = tuple(f"model.layers.0.mlp.experts.{one}.up_proj" for one in range(8))
    experts = modules(every, 256)
    others = modules(("model.layers.0.self_attn.q_proj",), 128)
    words = ["--source", EXAMPLE, "--prompt", PROMPT, "--max-tokens", 2]
    said = refused(ktconv("generate", int4, *words, "--adapter", experts), 2)
    assert f"--adapter changes experts, and those of {int4} were converted without it" in said
    ktconv_done("generate", int4, *words, "--adapter", others)
    ktconv_done("quantize-cpu", EXAMPLE, tmp_path / "with", "--adapter", experts)
    found = (
        ktconv("generate", tmp_path / "with", *words, *more, "--json").stdout
        for more in ((), ("--adapter", experts))
    )
    first, second = (json.loads(one)["tokens"] for one in found)
    assert first == second


def test_an_interrupt_leaves_the_text_so_far(int4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **named: Any) -> None:
        given[5](5)  # a token
        raise KeyboardInterrupt

    monkeypatch.setattr("ktconv.generate.run.generate", interrupted)
    words = ("generate", int4, "--source", EXAMPLE, "--prompt", PROMPT)
    result = ktconv(*words)
    assert result.exit_code == 130 and result.stdout
    assert result.stderr.endswith("Interrupted. The text is unfinished.\n")
    document = json.loads(ktconv(*words, "--json").stdout)
    assert document["error"]["hint"] == "Nothing was written."


def test_a_broken_tokenizer_is_named(int4: Path, tmp_path: Path) -> None:
    model = shutil.copytree(EXAMPLE, tmp_path / "model")
    for text, words in (('{"a":', "is not valid JSON"), ('{"a": 1}', "cannot load the tokenizer")):
        (model / "tokenizer.json").write_text(text)
        result = ktconv("generate", int4, "--source", model, "--prompt", PROMPT)
        refused(result, 2, "tokenizer.json", words)


@contextmanager
def as_stdin(data: bytes) -> Iterator[None]:
    """A pipe with `data` is the process's standard input inside."""
    (read, write), before = os.pipe(), os.dup(0)
    os.write(write, data)
    os.close(write)
    os.dup2(read, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(read)
        os.close(before)


def test_a_prompt_from_a_file(int4: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(PROMPT + "\n")
    words = ("generate", int4, "--source", EXAMPLE, "--max-tokens", 4)
    shown = ktconv_done(*words, "--prompt", PROMPT)
    assert ktconv_done(*words, "--prompt-file", tmp_path / "prompt") == shown
    with as_stdin(PROMPT.encode()):
        assert ktconv_done(*words, "--prompt-file", "-") == shown
    refused(ktconv(*words), 2, "generate needs a prompt")
    both = ("--prompt", PROMPT, "--prompt-file", tmp_path / "prompt")
    refused(ktconv(*words, *both), 2, "--prompt and --prompt-file cannot be combined")
    refused(ktconv(*words, "--prompt-file", tmp_path / "no"), 2, "--prompt-file", "cannot be read")
    (tmp_path / "prompt").write_bytes(b"a\xff")
    refused(ktconv(*words, "--prompt-file", tmp_path / "prompt"), 2, "not UTF-8 text at byte 1")


def test_errors(int4: Path, tmp_path: Path) -> None:
    given = ["generate", int4, "--prompt", PROMPT]
    refused(ktconv(*given), 2, "packed for KTransformers")
    refused_in_json(ktconv(*given, "--json"), 2, "packed for KTransformers")
    source = ["--source", EXAMPLE]
    refused(ktconv(*given, *source, "--chat"), 2, "has no chat template")
    refused(ktconv("generate", tmp_path / "no", *given[2:]), 2, "is not a directory")
    refused(ktconv(*given[:2], *source, "--prompt", "word " * 5000), 2, "the model reads at most")
    refused(ktconv(*given, *source, "--top-p", 0), 2, "--top-p 0.0 must be above 0")
    bad = with_template(tmp_path / "bad", "{{ raise_exception('no such role') }}")
    refused(ktconv(*given, "--source", bad), 2, "chat template", "no such role")
    for file in bad.glob("tokenizer*"):
        file.unlink()
    refused(ktconv(*given, "--source", bad), 2, "has no tokenizer")


def test_a_format_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ktconv.generate import loading

    monkeypatch.delattr(loading, "load_without_experts")
    output = tmp_path / "iq4"
    ktconv_done("quantize-cpu", EXAMPLE, output, "--method", "gguf-iq4_nl")
    result = ktconv("generate", output, "--source", EXAMPLE, "--prompt", PROMPT)
    refused(result, 2, "layer 0 of", "IQ4_NL", "no weight format of the kernels has exactly")


def test_an_output_of_another_model_is_refused(int4: Path, tmp_path: Path) -> None:
    """A model of the same sizes is refused, as its first expert computes something else."""
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(EXAMPLE, tmp_path / "other")
    for file in other.glob("*.safetensors"):
        tensors = load_file(file)
        flipped = {
            name: -one if ".up_proj." in name and ".experts." in name else one
            for name, one in tensors.items()
        }
        save_file(flipped, file)
    result = ktconv("generate", int4, "--source", other, "--prompt", PROMPT)
    refused(result, 2, "are not those of the model")


def test_missing_packages(int4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktconv.model.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs torch, which is not installed") as error:
        library.generate(int4, prompt=PROMPT, source=EXAMPLE)
    assert "ktconv[model]" in str(error.value.hint)
