"""One attention whose heads are divided over ranks with plain PyTorch, and its session of calls."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

DIM, WIDTH, QUERY_HEADS, ROOM = 16, 32, 8, 64


class Attention(torch.nn.Module):
    """Attention over buffers that hold this rank's KV heads; the same weights on any number of ranks.

    Args:
        kv_heads: of the whole model.
        mesh: None for one process. Its first dim divides the KV heads; over a second one they are
            copies, and only the query heads are divided.
    """

    def __init__(self, kv_heads: int, mesh: DeviceMesh | None = None):
        super().__init__()
        self.mesh = mesh
        rows = {"q": QUERY_HEADS, "k": kv_heads, "v": kv_heads}
        for seed, (name, heads) in enumerate(rows.items()):
            copies = name != "q"
            self.register_buffer(name, self._part(heads * DIM, WIDTH, seed, 0, copies))
        self.register_buffer("o", self._part(WIDTH, QUERY_HEADS * DIM, 3, 1, False))
        parts = 1 if mesh is None else mesh.size(0)
        shape = (1, kv_heads // parts, ROOM, DIM)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def _part(self, rows: int, columns: int, seed: int, dim: int, copies: bool) -> Tensor:
        whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 4
        if self.mesh is None:
            return whole
        second = Replicate() if copies else Shard(dim)
        return distribute_tensor(whole, self.mesh, [Shard(dim), second][: self.mesh.ndim])

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v, o = (w.to_local() if isinstance(w, DTensor) else w for w in self._weights())
        query, key, value = (
            F.linear(x, w).view(1, x.shape[1], -1, DIM).transpose(1, 2) for w in (q, k, v)
        )
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        mask = torch.arange(ROOM) <= positions[:, None]
        out = F.scaled_dot_product_attention(
            query, self.keys, self.values, mask, 0.0, enable_gqa=True
        )
        out = F.linear(out.transpose(1, 2).flatten(2), o)
        return out if self.mesh is None else collectives.all_reduce(out, "sum", dist.group.WORLD)

    def _weights(self):
        return self.q, self.k, self.v, self.o

    @torch.no_grad()
    def session(self, forward, counts=(40, 1, 1, 1)) -> Tensor:
        """Outputs of calls with `counts` tokens each."""
        outs, position = [], 0
        for count in counts:
            x = torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(position))
            outs.append(forward(x, torch.arange(position, position + count)))
            position += count
        return torch.cat(outs, 1)
