"""The HTML report: well formed, self-contained, deaf to hostile text, complete, readable."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from ktconv.verify.report import render_report
from ktconv.verify.report.values import figure

pytestmark = pytest.mark.slow

HOSTILE = "<script>document.title='owned'</script>\"'&<img src=x onerror=alert(1)>"
_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Elements with their attributes and texts; fails where an end tag is not the open one's."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[int] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open, [self.tags[index] for index in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        if tag not in _VOID:
            self.open.append(len(self.tags))
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.texts.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing, {self.getpos()}"
        found = self.tags[self.open.pop()][0]
        assert found == tag, f"</{tag}> closes <{found}>, {self.getpos()}"

    def handle_data(self, data: str) -> None:
        for index in self.open:
            self.texts[index].append(data)

    def all(self, tag: str, **attributes: str) -> list[str]:
        """The texts of all such elements."""
        return [
            "".join(text)
            for (name, found), text in zip(self.tags, self.texts, strict=True)
            if name == tag and attributes.items() <= found.items()
        ]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def a_result(layers: int = 3, experts: int = 5) -> dict[str, Any]:
    """A passed verification of all levels."""
    weights = [
        {
            "layer": layer,
            "relative_rms_error": 0.11 + layer / 100,
            "cosine": 0.9937,
            "max_error_steps": 0.5,
            "zero_share": 0.06,
            "experts": [0.1 + expert / 100 for expert in range(experts)],
        }
        for layer in range(layers)
    ]
    outputs = [
        {
            "layer": layer,
            "kernel_error": {"amx": 2e-3, "avx512": 8e-7},
            "quantization_error": 0.1,
            "quantization_error_with_shared": 0.06,
            "worst_expert": {"expert": 1, "error": 0.14},
            "experts_run": 4,
        }
        for layer in range(layers)
    ]
    worst = {"layer": 2, "expert": 4, "projection": "down", "relative_rms_error": 0.151}
    return {
        "schema": 1,
        "ktconv_version": "0.1.0",
        "passed": True,
        "level": "model",
        "output": "/models/out",
        "source": "/models/in",
        "method": "int4",
        "numa": 2,
        "sample": 1.0,
        "seed": 0,
        "seconds": 12.5,
        "failure_count": 0,
        "failures": [],
        "notes": [],
        "structure": {
            "passed": True,
            "tensors_expected": 90,
            "tensors_found": 90,
            "files": 2,
            "bytes_checked": 123456789,
            "checksums": 90,
            "copied_tensors": 7,
        },
        "weights": {
            "passed": True,
            "matrices": 45,
            "elements": 7_247_757_312,
            "relative_rms_error": 0.1123,
            "cosine": 0.99371,
            "max_error_steps": 0.5,
            "bound_steps": 0.5,
            "zero_share": 0.0631,
            "layers": weights,
            "worst": [worst | {"cosine": 0.99, "max_error_steps": 0.5, "zero_share": 0.07}],
        },
        "layers": {
            "passed": True,
            "states": "random",
            "tokens": 64,
            "isas": ["amx", "avx512"],
            "layers": outputs,
        },
        "model": {
            "passed": True,
            "text": "a text",
            "tokens": 4096,
            "perplexity_source": 7.4213,
            "perplexity_converted": 7.5127,
            "perplexity_increase": 0.0123,
            "kl_mean": 0.0182,
            "kl_p99": 0.21,
            "top1_agreement": 0.9473,
            "generation": {"prompt": "Why?", "source": "Because one.", "converted": "Because two."},
            "thresholds": {"perplexity_increase": 0.02, "another_limit": 0.77},
        },
        "provenance": {
            "manifest": {"method": "int4", "units": {f"unit {n}": {} for n in range(99)}},
            "machine": {"cpu": "A CPU", "isa": ["avx512", "amx"]},
        },
    }


def a_failed_result(layers: int = 3, experts: int = 5) -> dict[str, Any]:
    result = a_result(layers, experts)
    failures = [
        {
            "level": "weights",
            "check": "values",
            "message": f"value {n} is not the rounding of its source",
            "tensor": f"blk.{n}.weight",
            "layer": n,
            "row": 7,
            "source_value": 0.5,
            "value": -0.5,
            "steps": n + 0.5,
        }
        for n in range(30)
    ]
    failures.append({"level": "structure", "check": "checksum", "message": "the bytes changed"})
    return result | {"passed": False, "failures": failures, "failure_count": 12345}


def cells(page: Page) -> list[tuple[int, int, str]]:
    """Layer, expert and value of every cell of the heat map, by its tooltip."""
    form = re.compile(r"layer (\d+), expert (\d+): (.*)")
    found = (form.fullmatch(text) for text in page.all("title"))
    return [(int(match[1]), int(match[2]), match[3]) for match in found if match]


# --- the page ---------------------------------------------------------------------------


@pytest.mark.parametrize("result", [a_result(), a_failed_result(), {}], ids=["good", "bad", "none"])
def test_well_formed(result: dict[str, Any]) -> None:
    text = render_report(result)
    assert text.startswith("<!DOCTYPE html>\n")
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        if (link := attributes.get("href")) is not None:
            assert link.startswith("#") and link[1:] in ids


def test_needs_no_network() -> None:
    text = render_report(a_failed_result())
    for tag, attributes in Page(text).tags:
        assert not {"src", "srcset", "xlink:href", "data", "action", "poster"} & attributes.keys()
        assert tag not in {"link", "img", "iframe", "object", "embed", "form", "base"}
    assert not re.search(r"https?:|@import|url\((?!#)|//[a-z]", text)


def test_deterministic() -> None:
    result = a_failed_result()
    before = copy.deepcopy(result)
    assert render_report(result) == render_report(json.loads(json.dumps(result)))
    assert result == before


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, "Verification passed"),
        ({"passed": False}, "Verification failed"),
        ({"passed": None}, "Verification without a verdict"),
        ({"passed": "yes"}, "Verification failed"),
        ({"failure_count": 3}, "Verification failed"),
        ({"failures": [{"message": "odd"}]}, "Verification failed"),
    ],
)
def test_verdict(changes: dict[str, Any], title: str) -> None:
    assert Page(render_report(a_result() | changes)).all("h1") == [title]


def test_a_sample_is_named_beside_the_verdict() -> None:
    assert "sample of 5 %, not everything" in render_report(a_result() | {"sample": 0.05})
    assert "not everything" not in render_report(a_result())


@pytest.mark.parametrize("level", ["structure", "weights", "layers", "model", "provenance"])
def test_absent_sections_are_absent(level: str) -> None:
    assert Page(render_report(a_result())).all("section", id=level)
    for changes in ({level: None}, {}):
        result = {k: v for k, v in a_result().items() if k != level} | changes
        page = Page(render_report(result))
        assert not page.all("section", id=level)
        rest = {"structure", "weights", "layers", "model", "provenance"} - {level}
        assert all(page.all("section", id=name) for name in rest)
        if level != "provenance":
            assert page.all("li", **{"class": "skip"}) == [f"{level}not run"]


def test_provenance_leaves_long_lists_out() -> None:
    page = Page(render_report(a_result()))
    (text,) = page.all("section", id="provenance")
    assert "99 values" in text and "unit 5" not in text
    assert "A CPU" in text and "avx512, amx" in text
    without = a_result() | {"provenance": {"manifest": None, "machine": {}}}
    assert "There is none." in Page(render_report(without)).all("section", id="provenance")[0]


# --- failures ---------------------------------------------------------------------------


def test_every_failure_is_told() -> None:
    result = a_failed_result()
    (section,) = Page(render_report(result)).all("section", id="failures")
    for failure in result["failures"]:
        assert failure["message"] in section
        assert failure.get("tensor", "") in section
    assert "31 of 12,345 are listed" in section


def test_failures_come_first_and_the_worst_before_others() -> None:
    text = render_report(a_failed_result())
    assert text.index('id="failures"') < text.index('id="structure"')
    (section,) = Page(text).all("section", id="failures")
    places = [section.index(f"value {n} is not") for n in reversed(range(30))]
    assert places == sorted(places)
    assert section.index("the bytes changed") < places[0]


def test_unforeseen_facts_of_a_failure_are_shown() -> None:
    failures = [{"message": "odd", "moon": "full"}, "just words", {}]
    (section,) = Page(render_report(a_result() | {"failures": failures})).all(
        "section", id="failures"
    )
    assert "moon: full" in section and "just words" in section


# --- hostile and odd input --------------------------------------------------------------


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if not isinstance(value, (dict, list)):
        return
    for name, content in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(content, (*path, name))


def _with(result: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(result)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    assert isinstance(changed, dict)
    return changed


def test_hostile_text_stays_text() -> None:
    result = a_failed_result()
    result["failures"][0] |= dict.fromkeys(("tensor", "message", "file", "check"), HOSTILE)
    result["failures"][1] |= {HOSTILE: HOSTILE}
    result["notes"] = [HOSTILE]
    result["model"]["generation"] = dict.fromkeys(("prompt", "source", "converted"), HOSTILE)
    result["model"]["thresholds"][HOSTILE] = 1
    result["weights"]["layers"][0]["layer"] = HOSTILE
    result["layers"]["isas"] = [HOSTILE]
    result["provenance"]["machine"][HOSTILE] = HOSTILE
    result["provenance"][HOSTILE] = {HOSTILE: [HOSTILE]}
    result |= {"output": HOSTILE, "ktconv_version": HOSTILE, "level": HOSTILE}
    page = Page(render_report(result))
    assert page.count("script") == 1 and page.count("img") == 0
    assert not any(name.startswith("on") for _, found in page.tags for name in found)
    assert page.all("pre") == [HOSTILE] * 3
    assert HOSTILE in page.all("section", id="failures")[0]


def test_text_that_hides_or_turns_around_is_made_visible() -> None:
    text = "a\u202egnp.exe\x00\ud800\u200b end"
    result = a_result() | {"notes": [text]}
    page = render_report(result)
    assert r"a\u202egnp.exe\u0000\ud800\u200b end" in page
    page.encode()


@pytest.mark.parametrize(
    "value",
    [None, math.nan, math.inf, -math.inf, -1.5, 0, 1e308, 5e-324, 10**400, True, [], {}, HOSTILE],
    ids=lambda value: repr(value)[:12],
)
def test_any_value_may_stand_anywhere(value: Any) -> None:
    result = a_failed_result(layers=1, experts=2)
    result["failures"] = result["failures"][-2:]
    units = result["provenance"]["manifest"]["units"]
    result["provenance"]["manifest"]["units"] = dict(list(units.items())[:3])  # all are alike
    # Whole sections alone; else a place in each part of the page that knows nothing of others.
    paths = list(_leaves(result))
    whole = [(path,) for path in paths if len(path) == 1]
    parts = [
        [path for path in paths if len(path) > 1 and path[0] == name]
        for name in dict.fromkeys(path[0] for path in paths)
    ]
    for places in [*whole, *zip_longest(*parts)]:
        changed = result
        for path in filter(None, places):
            changed = _with(changed, path, value)
        text = render_report(changed)
        assert text.count("<script>") == 1, places
        assert text.endswith("</html>\n")


def test_all_errors_nan_or_missing() -> None:
    for value in (math.nan, math.inf, "NaN", None, 0.0):
        result = a_result()
        for layer in result["weights"]["layers"]:
            layer |= {"relative_rms_error": value, "experts": [value] * 5}
        for layer in result["layers"]["layers"]:
            layer |= {"quantization_error": value, "kernel_error": {"amx": value}}
        text = render_report(result)
        assert len(cells(Page(text))) == 15
        assert not re.search(r'(?: d| x| y|width|height)="[^"]*(?:nan|inf)', text)


# --- pictures ---------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (4, 16), (61, 384)])
def test_heat_map_has_a_cell_per_layer_and_expert(layers: int, experts: int) -> None:
    found = cells(Page(render_report(a_result(layers, experts))))
    wanted = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    assert [cell[:2] for cell in found] == wanted


def test_layers_may_have_unlike_numbers_of_experts() -> None:
    result = a_result()
    result["weights"]["layers"][1]["experts"] = [0.1] * 9
    result["weights"]["layers"][2]["experts"] = []
    found = [cell[0] for cell in cells(Page(render_report(result)))]
    assert [found.count(layer) for layer in range(3)] == [5, 9, 0]


def test_what_was_not_sampled_differs_from_zero() -> None:
    result = a_result()
    result["weights"]["layers"][1]["experts"] = [None, 0.0, math.nan, 0.1, 0.2]
    text = render_report(result)
    words = [value for layer, _, value in cells(Page(text)) if layer == 1]
    assert words == ["not sampled", "0", "NaN", "0.1", "0.2"]
    kinds = [
        re.search(rf'class="(\w+)"><title>layer 1, expert {expert}:', text) for expert in range(5)
    ]
    assert [kind[1] for kind in kinds if kind][:3] == ["m", "z", "x"]
    for name in ("not sampled", "exactly 0", "not a finite number"):
        assert name in Page(text).all("ul", **{"class": "legend"})[0]


def test_the_worst_cell_has_the_last_colour() -> None:
    result = a_result()
    result["weights"]["layers"][1]["experts"][3] = 0.9
    text = render_report(result)
    assert 'class="c15"><title>layer 1, expert 3: 0.9<' in text
    assert text.count('class="c15"><title>') == 1
    assert "log scale" in Page(text).all("ul", **{"class": "legend"})[0]


def test_axes_say_what_they_show() -> None:
    texts = Page(render_report(a_result())).all("text")
    assert "layer" in texts and "expert" in texts
    assert "relative error (0.1 = 10 %)" in texts
    assert "relative error (0.1 = 10 %), log scale" in texts
    assert {"1e−6", "0.0001", "0.1"} <= set(texts)


def test_a_layer_that_was_not_measured_is_hatched() -> None:
    result = a_result()
    result["weights"]["layers"][1] |= {"relative_rms_error": None}
    titles = Page(render_report(result)).all("title")
    assert "layer 1: not measured" in titles


def test_zero_has_a_mark_of_its_own_on_a_log_axis() -> None:
    result = a_result()
    assert 'class="hollow' not in render_report(result)
    result["layers"]["layers"][1]["kernel_error"]["avx512"] = 0.0
    text = render_report(result)
    mark = r'<path class="hollow [^>]*><title>layer 1, kernel, avx512: 0</title>'
    assert re.search(mark, text)
    assert "exactly 0" in Page(text).all("ul", **{"class": "legend"})[-1]


def test_model_side_by_side() -> None:
    page = Page(render_report(a_result()))
    assert page.all("pre") == ["Why?", "Because one.", "Because two."]
    assert page.all("mark") == ["one.", "two."]
    (section,) = page.all("section", id="model")
    for words in ("7.421", "7.513", "+1.23 %", "94.73 %", "0.0182", "another_limit", "0.77"):
        assert words in section


def test_drift_by_layer() -> None:
    """A chart and a table; nothing where models were not passed layer by layer."""
    result = a_result()
    assert "Drift by layer" not in render_report(result)
    result["model"]["layers"] = [
        {"layer": n, "relative_error": error, "token_error": 2 * error, "cosine": 1 - error / 9}
        for n, error in enumerate([0.0, 0.0123, 0.0456, 7.0])
    ]
    result["model"]["layers"][3]["relative_error"] = "nan"
    page = Page(render_report(result))
    (section,) = page.all("section", id="model")
    assert "Drift by layer" in section and "0.01230" in section and "0.09120" in section
    titles = page.all("title")
    assert "layer 2, all tokens: 0.0456" in titles and "layer 3, all tokens: NaN" in titles
    assert "layer 3, mean of tokens: 14" in titles and "layer 0, all tokens: 0" in titles


def test_no_text_was_generated() -> None:
    result = a_result()
    result["model"]["generation"] = None
    page = Page(render_report(result))
    assert "Generated text" not in page.all("section", id="model")[0]


def test_thresholds_stand_beside_their_measures() -> None:
    result = a_result()
    result["model"]["thresholds"] = {"max_ppl_increase": 0.0777, "max_kl": 0.0888}
    (table,) = Page(render_report(result)).all("table")[-1:]
    rows = [line for line in table.splitlines() if "0.0777" in line or "0.0888" in line]
    assert rows == ["increase of perplexity0.01230.0777", "KL divergence, mean0.01820.0888"]


# --- in a browser -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found


def _opened(browser: str, text: str, directory: Path) -> tuple[str, str]:
    """The document after its scripts ran, and what the console said."""
    (directory / "report.html").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", "--virtual-time-budget=2000"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={directory / 'profile'}"),
            (directory / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_chromium_runs_our_script_and_no_other(browser: str, tmp_path: Path) -> None:
    result = a_failed_result()
    result["failures"][0]["tensor"] = HOSTILE
    text = render_report(result)
    document, console = _opened(browser, text, tmp_path)
    assert '<html lang="en" class="js">' in document
    assert "<title>Verification failed: out</title>" in document
    assert not console
    owned = text.replace("<main>", "<main><script>document.title = 'owned'</script>")
    document, console = _opened(browser, owned, tmp_path)
    assert "<title>Verification failed: out</title>" in document
    assert "Content Security Policy" in console


def test_chromium_sorts_a_table_by_a_click(browser: str, tmp_path: Path) -> None:
    text = render_report(a_result())
    head = "#by-layer th:nth-child(2) button"  # relative RMS error, which grows with the layer
    click = f"<script>document.querySelector('{head}').click()</script></body>"
    text = re.sub(r"<meta http-equiv=[^>]*>", "", text).replace("</body>", click)
    document, console = _opened(browser, text, tmp_path)
    rows = document[document.index('id="by-layer"') :].split("<tr>")[2:5]
    assert [re.findall(r">([^<]+)</td>", row)[0] for row in rows] == ["2", "1", "0"]
    assert not console


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (9999.4, "9999"),
        (25083.3, "25,083"),
        (-446208.1, "−446,208"),
        (1.5e7 + 0.5, "1.5e7"),
        (0.1, "0.1"),
    ],
)
def test_rates_have_no_exponent(value: float, shown: str) -> None:
    assert figure(value) == shown
