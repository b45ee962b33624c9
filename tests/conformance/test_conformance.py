"""Every architecture and every style: found, rewritten or declined with a reason, and always right.

`pytest -m conformance tests/conformance` runs the whole table; without the marker a sample is run.
"""

from __future__ import annotations

import pytest

from tests.compare import TOLERANCE, cheap
from tests.conformance.rows import ROWS, SAMPLE, Row
from tests.conformance.session import Result

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]

MOST_TIES = 40


def _parameters(rows: list[Row]) -> list:
    return [pytest.param(row, id=row.id) for row in rows]


@pytest.mark.conformance
@pytest.mark.parametrize("row", _parameters(ROWS))
def test_row(row):
    check(row.measure())


@pytest.mark.parametrize("row", _parameters([row for row in ROWS if row.id in SAMPLE]))
def test_sample(row):
    check(row.measure())


def check(result: Result) -> None:
    """What must hold of every row, rewritten or not."""
    assert not result.problem, result.problem
    assert result.oracle <= TOLERANCE, f"wrong: {result.oracle:.1e} from the oracle"
    assert result.exact <= TOLERANCE, f"wrong: {result.exact:.1e} where nothing is packed"
    assert result.ties <= MOST_TIES, "too many ties to be ties"
    assert result.found == result.attentions, f"not seen: {result.silent}"
    if result.direct < result.attentions:
        assert result.reasons, "not rewritten, and no reason"
    if result.rewritten == result.attentions:
        assert result.effect > 10 * TOLERANCE, "packing changes nothing here: this proves nothing"
    # A cache of each kind may cost one more graph: that in which it is adopted.
    assert result.graphs <= result.plain_graphs + 1
