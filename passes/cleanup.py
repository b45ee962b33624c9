"""Last pass: what the rewrite left behind (dead masks, views, casts, group expansions)."""

from __future__ import annotations

from torch.fx import GraphModule


def cleanup(module: GraphModule) -> GraphModule:
    """Remove dead nodes and recompile, in place."""
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module
