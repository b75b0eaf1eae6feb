"""A lone node of eight GPUs as a fixture: ``from tests.lone_site import site``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.lone_node import LoneNode

__all__ = ["site"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LoneNode]:
    """Nothing runs on it yet; whatever a test starts ends with it."""
    made = LoneNode(tmp_path, n_gpus=8)
    try:
        yield made
    finally:
        made.close()
