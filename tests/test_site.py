"""The site of the documentation: pages made from the program, links, pictures, what it loads."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.docs_modules import module
from helpers.paths import DOCS, ROOT

from ktconv.cli.commands import COMMANDS, exit_codes

pytestmark = pytest.mark.process

HOOKS = module("site_hooks")
PAGES: dict[str, str] = HOOKS.generated()
BY_NAME: dict[str, Any] = HOOKS.commands()
SITE_PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in HOOKS.OF_ROOT.values())]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_page_with_all_its_options(name: str) -> None:
    page, command = PAGES[f"commands/{name}.md"], BY_NAME[name]
    assert " ".join(command.help.split("\n\n")[0].split()) in page
    for parameter in command.params:
        assert parameter.help
        if parameter.param_type_name == "option":
            for spelling in (*parameter.opts[:1], *parameter.secondary_opts):
                assert f"`{spelling}" in page
        else:
            assert f"`{parameter.metavar or parameter.name.upper()}`" in page
    for heading in ("Options", "Exit codes", "Read on"):
        assert f"\n## {heading}\n" in page
    assert "Example:\n\n```\nktconv " in page
    assert ("| 1 |" in page) == (1 in exit_codes(name))


def test_a_page_has_defaults_and_values() -> None:
    rows = dict(re.findall(r"^\| (`--.*?) \| (.*) \|$", PAGES["commands/quantize-cpu.md"], re.M))
    assert rows["`--max-shard-size SIZE`"] == "Maximum size of a shard. Default: `5GB`."
    assert rows[r"`--layout safetensors\|layers`"].endswith(
        "Default: `safetensors`.<br>- `safetensors`: shards with an index<br>- `layers`: folders "
        "`_layer_L/_numa_N` of .kt files"
    )
    assert "Values: `auto`, `bar`, `lines`, `json`, `none`." in rows["`--progress MODE`"]
    assert "[docs/recipes.md](../recipes.md)" in rows["`--recipe FILE.toml`"]
    assert "Default: `--verify`." in rows["`--verify`, `--no-verify`"]
    assert "`mxfp8`" in rows["`--method METHOD`"]
    assert "Values" not in rows["`--json`"]
    assert "| `--mtp`, `--no-mtp` | Include or omit MTP layers.<br>" in PAGES["commands/merge.md"]
    assert r"`--importance FILE\|weights`" in rows


def test_a_page_needs_nothing_but_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an option means is written once: in its declaration."""
    site = module("site_commands")
    option = next(one for one in BY_NAME["merge"].params if one.opts[0] == "--source")
    monkeypatch.setattr(option, "help", "Quite another text | with a bar.")
    monkeypatch.setattr(option, "detail", "See docs/maps.md#keys.\n\n- A: one\n- B: two\n  lines")
    lines = site.page("merge", BY_NAME["merge"]).split("\n")
    row = next(line for line in lines if line.startswith("| `--source"))
    assert row == (
        "| `--source MODEL` | Quite another text \\| with a bar."
        "<br>See [docs/maps.md](../maps.md#keys).<br>- `A`: one<br>- `B`: two lines |"
    )


def test_guides_are_pages_and_read_on() -> None:
    site = module("site_commands")
    assert list(site.GUIDES) == list(site.MORE) == list(COMMANDS)
    for name, guide in site.GUIDES.items():
        assert (DOCS / f"{guide}.md").is_file()
        assert f"](../{guide}.md)" in PAGES[f"commands/{name}.md"]


def test_a_link_that_is_called_like_a_file_is_called_like_its_page() -> None:
    class Target:
        content_string = "# Maps: models whose names\n\nText\n"

    class Page:
        class file:
            src_uri = "commands/verify.md"

    class Files:
        @staticmethod
        def get_file_from_path(path: str) -> Any:
            return Target if path == "maps.md" else None

    text = "[maps.md](../maps.md#keys), [docs/maps.md](../maps.md), [here](../maps.md)"
    found = HOOKS.on_page_markdown(text, Page, None, Files)
    assert found == "[Maps](../maps.md#keys), [Maps](../maps.md), [here](../maps.md)"


def test_links_out_of_docs_lead_to_the_repository(logged: list[logging.LogRecord]) -> None:
    class File:
        src_uri = "runtime.md"

    class Page:
        file = File

    class Config:
        repo_url = "https://example.org/r"

    class Files:
        @staticmethod
        def get_file_from_path(path: str) -> bool | None:
            return (path in ("index.md", "formats.md", "benchmarks/results.md")) or None

    text = (
        "[a](../src/ktconv/) [b](../README.md#x) [c](formats.md#y) [d](../LICENSE) [e](https://z) "
        "[f](../benchmarks/RESULTS.md)"
    )
    found = HOOKS.on_page_markdown(text, Page, Config, Files)
    assert found == (
        "[a](https://example.org/r/tree/main/src/ktconv) [b](index.md#x) [c](formats.md#y) "
        "[d](https://example.org/r/blob/main/LICENSE) [e](https://z) [f](benchmarks/results.md)"
    )
    assert not logged
    HOOKS.on_page_markdown("[g](../src/nowhere.py)", Page, Config, Files)
    assert [record.levelno for record in logged] == [logging.WARNING]
    assert "src/nowhere.py" in logged[0].getMessage()


@pytest.fixture
def small_site(tmp_path: Path) -> Path:
    """mkdocs.yml with the settings of ours, for two pages; index.md is the test's."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/other.md").write_text("# Other\n\n## There\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nsite_dir: site\ntheme: {{name: mkdocs}}\n"
        "nav: [index.md, other.md]\nplugins: []\nhooks: []\nextra_css: []\n"
    )
    return config


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("[a](other.md) [b](other.md#there)", True),
        ("[a](missing.md)", False),
        ("[a](other.md#nowhere)", False),
        ("[a](#nowhere)", False),
        ("[a](/other)", False),
    ],
)
def test_a_broken_link_ends_the_build(text: str, fine: bool, small_site: Path) -> None:
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    (small_site.parent / "docs/index.md").write_text(f"# Front\n\n{text}\n")
    config = load_config(str(small_site))
    if fine:
        build(config)
    else:
        with pytest.raises(Abort, match="strict"):
            build(config)


def test_a_broken_link_ends_make(small_site: Path) -> None:
    """With the options that the Makefile gives to mkdocs: --quiet would hide warnings from the
    strict mode, too."""
    pytest.importorskip("mkdocs")
    (small_site.parent / "docs/index.md").write_text("# Front\n\n[a](missing.md)\n")
    lines = re.findall(r"/mkdocs (build.*)", (ROOT / "Makefile").read_text("utf-8"))
    assert len(lines) == 2
    for line in set(lines):
        command = [sys.executable, "-m", "mkdocs", *line.split(), "-f", str(small_site)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "missing.md" in done.stderr + done.stdout


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example.org/a.js"></script>',
        '<img alt="" src="//example.org/a.png">',
        '<link rel="stylesheet" href="https://fonts.example.org/css">',
    ],
)
def test_what_loads_from_another_host_ends_the_build(
    html: str, logged: list[logging.LogRecord]
) -> None:
    fine = (
        '<a href="https://example.org">x</a><img src="a.png"><link rel="stylesheet" href="a.css">'
    )
    HOOKS.on_post_page(fine)
    assert not logged
    HOOKS.on_post_page(fine + html)
    assert "example.org" in logged[0].getMessage() and logged[0].levelno == logging.WARNING


def test_the_theme_asks_no_other_host() -> None:
    assert "font: false" in (ROOT / "mkdocs.yml").read_text("utf-8")
    source = '<a href="https://example.org" class="md-source" data-md-component="source">'
    for event in (HOOKS.on_post_page, HOOKS.on_post_template):
        assert event(source) == '<a href="https://example.org" class="md-source">'


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert re.search(rf" {page.name}$", listed, re.M), page.name


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading, which the site must give, too."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", SITE_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_anchors_exist_on_github(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([^)\s]+)\)", page.read_text("utf-8")):
        target = (page.parent / name) if name else page
        headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
        assert anchor in map(slug, headings), f"{name}#{anchor}"


def test_records_of_the_api_have_signatures_and_comments(tmp_path: Path) -> None:
    griffe = pytest.importorskip("griffe")
    (tmp_path / "one.py").write_text(
        "from msgspec import Struct, field\nclass A(Struct, frozen=True):\n    '''An A.'''\n"
        "    x: int  # in bytes | or <none>\n    y: int = 0\n    # of the\n    # run\n"
        "    z: list = field(default_factory=list)\n"
        "class B(A, kw_only=True):\n    '''A B.'''\n    w: str\n"
        "class C:\n    '''No record.'''\n    x: int  # of C\n"
    )
    extensions = griffe.load_extensions(module("site_fields").RecordFields)
    loaded = griffe.load("one", search_paths=[str(tmp_path)], extensions=extensions)
    table = loaded["A"].docstring.value.split("\n\n")[1].split("\n")
    assert table[2:] == ["| `x` | in bytes \\| or &lt;none> |", "| `z` | of the run |"]
    assert loaded["A"].signature() == "A(x: int, y: int = 0, z: list = list())"
    own = "x: int, y: int = 0, z: list = list(), *, w: str"
    assert loaded["B"].signature() == f"B({own})"
    assert (loaded["C"].docstring.value, "__init__" in loaded["C"].members) == ("No record.", False)


def test_all_of_the_reference_says_what_it_does() -> None:
    """Docstrings of a whole phrase, of public functions, classes and methods."""
    griffe = pytest.importorskip("griffe")
    loader = griffe.GriffeLoader(search_paths=[str(ROOT / "src")])
    loader.load("ktconv")
    loader.resolve_aliases(implicit=False)
    poor = []

    def visit(one: Any) -> None:
        found = one.final_target if one.is_alias else one
        words = found.docstring.value.split() if found.docstring else []
        if len(words) < 4 and not found.is_attribute:
            poor.append(found.path)
        members = found.members.values() if found.is_class else ()
        for member in members:
            if not member.is_alias and member.is_function and not member.name.startswith("_"):
                visit(member)

    for _, _, names in HOOKS.API.values():
        for name in names:
            module_or_class = loader.modules_collection[name.partition(":")[0]]
            exported = module_or_class.exports if module_or_class.is_module else None
            for one in map(str, exported or ()):
                visit(module_or_class.members[one])
            if not exported:
                visit(module_or_class)
    assert not poor


def test_the_reference_names_what_there_is() -> None:
    from importlib.util import find_spec

    for _, _, names in HOOKS.API.values():
        for name in (one.partition(":")[0] for one in names):
            owner, _, last = name.rpartition(".")
            if last.islower():
                assert find_spec(name), name
            else:
                text = Path(str(find_spec(owner).origin)).read_text("utf-8")  # type: ignore[union-attr]
                assert f"class {last}" in text, name


PICTURE = re.compile(r"!\[[^]]+\]\(([^)]+)\)")


def test_pictures_exist_and_all_are_used() -> None:
    named = {
        (page.parent / target).resolve()
        for page in SITE_PAGES
        for target in PICTURE.findall(page.read_text("utf-8"))
    }
    assert all(path.is_file() for path in named)
    there = set((DOCS / "pictures").iterdir())
    assert there == {path for path in named if path.parent == DOCS / "pictures"}
    sizes = [path.stat().st_size for path in there]
    made = module("make_screenshots")
    assert {path.stem for path in there} == made.NEEDS.keys()
    assert max(sizes) <= made.MOST_BYTES and sum(sizes) < 1_000_000


def test_a_picture_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module("make_screenshots")
    monkeypatch.setattr(made, "BROWSERS", ())
    monkeypatch.setattr("sys.argv", ["make_screenshots.py", "verify"])
    with pytest.raises(SystemExit, match="the picture verify needs a browser, which is not"):
        made.main()
    monkeypatch.setattr("sys.argv", ["make_screenshots.py", "moon"])
    with pytest.raises(SystemExit, match="no picture moon: choose from verify"):
        made.main()


def test_figures_of_the_page_are_those_of_the_results() -> None:
    """Each row of docs/performance.md names the section that has its numbers."""
    results = (ROOT / "benchmarks/RESULTS.md").read_text("utf-8")
    _, *parts = re.split(r"^##+ (.+)$", results, flags=re.MULTILINE)
    sections = {slug(head): text for head, text in zip(parts[::2], parts[1::2], strict=True)}
    text = (DOCS / "performance.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+) \| \[[^]]+\]\(\S+RESULTS\.md#(\S+)\) \|$", text, re.MULTILINE)
    assert len(rows) >= 15
    for row, anchor in rows:
        for number in re.findall(
            r"(?<![\w.])x?(\d+(?:[.]\d+|(?: \d{3})+)?)(?![\w.])", row.split(" | ", 1)[1]
        ):
            found = re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]\d)", sections[anchor])
            assert found, f"{row}: {number} is not in the section {anchor}"
