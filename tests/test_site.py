"""The pages of the documentation's site that are made from the program."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from helpers.paths import DOCS, ROOT

from ktconv.cli.app import COMMANDS

HOOKS = runpy.run_path(str(DOCS / "site_hooks.py"))
PAGES: dict[str, str] = HOOKS["generated"]()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_page_with_all_its_options(name: str) -> None:
    page = PAGES[f"commands/{name}.md"]
    command: Any = HOOKS["commands"]()[name]
    assert command.help.split("\n")[0] in page
    for parameter in command.params:
        if parameter.param_type_name == "option":
            for spelling in (*parameter.opts, *parameter.secondary_opts):
                assert f"`{spelling}" in page
            assert parameter.help


def test_links_out_of_docs_lead_to_the_repository() -> None:
    class File:
        src_uri = "runtime.md"

    class Page:
        file = File

    class Config:
        repo_url = "https://example.org/r"

    class Files:
        @staticmethod
        def get_file_from_path(path: str) -> bool | None:
            return (path in ("index.md", "formats.md")) or None

    text = (
        "[a](../src/ktconv/) [b](../README.md#x) [c](formats.md#y) [d](../LICENSE) [e](https://z)"
    )
    found = HOOKS["on_page_markdown"](text, Page, Config, Files)
    assert found == (
        "[a](https://example.org/r/tree/main/src/ktconv) [b](index.md#x) [c](formats.md#y) "
        "[d](https://example.org/r/blob/main/LICENSE) [e](https://z)"
    )


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert f" {page.name}\n" in listed, page.name
