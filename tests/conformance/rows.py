"""The rows of the table: every architecture and every hand-written style, and how to measure each."""

from __future__ import annotations

import dataclasses

from tests.conformance import session, style_session, styles, styles_known, styles_more
from tests.conformance.architectures import ARCHITECTURES, DYNAMIC, EAGER, SDPA, STATIC
from tests.conformance.session import Result

STYLES: dict[str, type[styles.Style]] = {
    style.__name__.lstrip("_"): style
    for module in (styles_known, styles, styles_more)
    for style in vars(module).values()
    if isinstance(style, type)
    and issubclass(style, styles.Style)
    and style.__module__ == module.__name__
    and style is not styles.Style
    and not style.__name__.startswith("_")
}
SAMPLE = (  # run without the marker: every family of writes in a minute
    "GPT-2-static-sdpa",
    "Bloom-dynamic-eager",
    "Qwen2-MoE-static-eager",
    "Scattered",
    "SlotsBeforeHeads",
    "Shared",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: of the architecture or style.
        cache: "static" or "dynamic"; for a style the kind of its cache.
        attention: how attention is computed.
    """

    name: str
    cache: str
    attention: str

    @property
    def is_style(self) -> bool:
        return self.name in STYLES

    @property
    def id(self) -> str:
        return self.name if self.is_style else f"{self.name}-{self.cache}-{self.attention}"

    def measure(self) -> Result:
        if self.is_style:
            return style_session.run(STYLES[self.name])
        return session.run(ARCHITECTURES[self.name], self.cache, self.attention)


def _rows() -> list[Row]:
    rows = [
        Row(name, cache, attention)
        for name, architecture in ARCHITECTURES.items()
        for attention in architecture.attentions
        for cache in architecture.caches
        if not architecture.brief or _crossed(architecture, cache, attention)
    ]
    return rows + [Row(name, style.kind, style.attention) for name, style in STYLES.items()]


def _crossed(architecture, cache: str, attention: str) -> bool:
    """Of four combinations two, in which every cache and every implementation comes once."""
    if len(architecture.attentions) * len(architecture.caches) < 4:
        return True
    return (cache, attention) in ((STATIC, SDPA), (DYNAMIC, EAGER))


ROWS = _rows()
