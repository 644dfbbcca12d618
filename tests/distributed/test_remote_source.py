"""A source on a web server, read by every node itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.cli import run
from helpers.stores import close_stores
from helpers.web_server import serving

from ktconv.distributed.cluster import Cluster

pytestmark = pytest.mark.slow


def test_nodes_read_a_signed_url(
    nodes: Any, cluster: Cluster, model: Path, clean: Path, tmp_path: Path
) -> None:
    """The same bytes; the driver transfers headers only; no signature in a file or log."""
    pytest.importorskip("aiohttp")
    pytest.importorskip("fsspec")
    with serving(model) as web:
        web.query = "sig=verysecret"
        url = f"{web.url}/?sig=verysecret"
        result = run(url, tmp_path / "output", "--ray", "--threads=1")
        close_stores()
    assert result.exit_code == 0 and "verysecret" not in result.output, result.output
    for path in sorted(clean.glob("*.safetensors*")):
        assert (tmp_path / "output" / path.name).read_bytes() == path.read_bytes()
    written = [tmp_path / "output", Path(nodes.head_node.get_logs_dir_path())]
    files = [path for root in written for path in root.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if b"verysecret" in path.read_bytes()] == []
