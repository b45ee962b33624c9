"""The whole table is run on demand: `pytest -m conformance`."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "conformance" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("conformance")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
