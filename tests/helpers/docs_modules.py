"""The modules in docs/, which make the site of the documentation."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from helpers.paths import DOCS


def module(name: str) -> Any:
    """docs/NAME.py, which imports its neighbours as mkdocs lets it."""
    if name not in sys.modules:
        sys.path.insert(0, str(DOCS))
        try:
            importlib.import_module(name)
        finally:
            sys.path.remove(str(DOCS))
    return sys.modules[name]
