"""Entry points of the Triton kernels: checks, and which kernel runs.

Nothing here reads device memory: the number of launches depends on shapes alone, so that CUDA
graphs can replay them. Importing this needs no Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..cache.buffers import PER_BLOCK, START, Buffers, allocate
from ..codec.spec import CacheSpec
from .served import why_not

FEW_QUERIES = 16  # query tokens up to which the decode kernel is used


# -- checks ------------------------------------------------------------------------------------
def _check_spec(device: torch.device, *specs: CacheSpec) -> None:
    for spec in specs:
        if reason := why_not(device, spec):
            raise NotImplementedError(f"hqmq kernels, {spec.role}: {reason}")


def _check_buffers(spec: CacheSpec, buffers: Buffers) -> None:
    if not all(t.is_contiguous() for t in buffers):
        raise ValueError(f"the buffers of a packed {spec.role} cache must be contiguous")
    if buffers.codes.shape[-1] != spec.row_bytes or buffers.codes.shape[2] % spec.block:
        raise ValueError(f"these buffers {tuple(buffers.codes.shape)} are not of the spec {spec}")


def _check_tokens(spec: CacheSpec, buffers: Buffers, tokens: torch.Tensor) -> None:
    batch, heads = buffers.codes.shape[:2]
    if tokens.dim() != 4 or (*tokens.shape[:2], tokens.shape[3]) != (batch, heads, spec.head_dim):
        raise ValueError(
            f"tokens {tuple(tokens.shape)} do not fit a cache [{batch}, {heads}, ..., "
            f"{spec.head_dim}]"
        )


def _check_query(query, key_spec, key, value) -> None:
    batch, heads = key.codes.shape[:2]
    good = query.dim() == 4 and query.shape[0] == batch and query.shape[3] == key_spec.head_dim
    if not good or query.shape[1] % heads or value.codes.shape[:2] != (batch, heads):
        raise ValueError(
            f"query {tuple(query.shape)} does not fit caches [{batch}, {heads}, ..., "
            f"{key_spec.head_dim}] and {tuple(value.codes.shape[:2])}"
        )


def _mask4(mask: torch.Tensor | None, query: torch.Tensor, length: int) -> torch.Tensor | None:
    """The mask expanded to `[B, Hq, n, length]`, without a copy."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(f"a mask is bool or floating point, not {mask.dtype}")
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if mask.dtype == torch.float64:
        mask = mask.float()
    return mask.expand(*query.shape[:3], length)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _on_its_device(entry: Callable) -> Callable:
    """Launch where the tensors are: Triton takes the current device, as for a model on two GPUs."""

    @functools.wraps(entry)
    def launch(*args, **kwargs):
        first = next(a for a in args if isinstance(a, torch.Tensor | Buffers))
        with torch.cuda.device_of(first.codes if isinstance(first, Buffers) else first):
            return entry(*args, **kwargs)

    return launch


# -- reading -----------------------------------------------------------------------------------
@_on_its_device
def dequantize(
    spec: CacheSpec, buffers: Buffers, length: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Logical slots 0..length-1, dense `[B, H, length, D]` in the dtype of the cache (or of `out`)."""
    from . import read

    _check_spec(buffers.codes.device, spec)
    _check_buffers(spec, buffers)
    shape = (*buffers.codes.shape[:2], length, spec.head_dim)
    if out is None:
        out = torch.empty(shape, dtype=spec.torch_dtype, device=buffers.codes.device)
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} must be contiguous and {shape}")
    return read.dequantize(spec, buffers, 0, length, out) if out.numel() else out


@_on_its_device
def attend(
    query: torch.Tensor,
    key_spec: CacheSpec,
    key_buffers: Buffers,
    value_spec: CacheSpec,
    value_buffers: Buffers,
    first: int,
    length: int,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    fast: bool = True,
) -> torch.Tensor:
    """Attention of `query` `[B, Hq, n, D]` over logical slots first..first+length-1 as stored.

    As `cache.attend.attend`, with logical slots: START is read on the device. `fast` takes the Gluon
    kernel where it serves the call. Returns `[B, Hq, n, Dv]` in the dtype of `query`.
    """
    options = {"scale": scale, "mask": mask, "causal": causal, "softcap": softcap, "sinks": sinks}
    options["fast"] = fast
    _check(query, key_spec, key_buffers, value_spec, value_buffers)
    return _attend(
        query, key_spec, key_buffers, value_spec, value_buffers, first, length,
        key_buffers.state, None, None, 0, options,
    )  # fmt: skip


def _check(query, key_spec, key_buffers, value_spec, value_buffers) -> None:
    _check_spec(query.device, key_spec, value_spec)
    _check_buffers(key_spec, key_buffers)
    _check_buffers(value_spec, value_buffers)
    _check_query(query, key_spec, key_buffers, value_buffers)


def _attend(
    query,
    key_spec,
    key,
    value_spec,
    value,
    first,
    length,
    origin,
    tokens,
    positions,
    start,
    options,
) -> torch.Tensor:
    """`tokens`: keys and values that stand over what is stored from `positions[0]` or `start` on."""
    from . import attend_portable, prefill, read

    n = query.shape[2]
    options = dict(options)
    fast = options.pop("fast", True)
    if length == 0 or not query.numel():
        return query.new_zeros(*query.shape[:3], value_spec.head_dim)
    options = options | {"mask": _mask4(options["mask"], query, length)}
    fresh = {"origin": origin, "positions": positions, "start": start}
    if fast and n == 1 and tokens is None and query.is_cuda:
        from . import attend as gluon

        if (
            gluon.why_not(key_spec, value_spec, query, n, query.shape[1] // key.codes.shape[1])
            is None
        ):
            return gluon.attend(
                query, key_spec, key, value_spec, value, first, length, origin=origin, **options
            )
    if n <= FEW_QUERIES:
        return attend_portable.attend(
            query, key_spec, key, value_spec, value, first, length,
            processors=_processors(query.device), tokens=tokens, **fresh, **options,
        )  # fmt: skip
    if options["causal"] and length > n:  # later slots are hidden
        length = n
        if options["mask"] is not None:
            options["mask"] = options["mask"][..., :n]
    dense = []
    for i, (spec, buffers) in enumerate(((key_spec, key), (value_spec, value))):
        out = query.new_empty(*buffers.codes.shape[:2], length, spec.head_dim)
        part = tokens and tokens[i]
        dense.append(read.dequantize(spec, buffers, first, length, out, tokens=part, **fresh))
    return prefill.attend_dense(query, *dense, **options)


# -- writing -----------------------------------------------------------------------------------
@_on_its_device
def write(
    spec: CacheSpec,
    buffers: Buffers,
    tokens: torch.Tensor,
    positions: torch.Tensor | None = None,
    start: int = 0,
    keep: int = 0,
    limit: int = 0,
    median: torch.Tensor | None = None,
) -> None:
    """Write `tokens` `[B, H, n, D]` in place, as `cache.write.write`.

    Args:
        positions: int `[n]` on the device, consecutive logical slots; None: from `start` on.
        keep, limit, median: as in `cache.write.write`.

    Raises:
        IndexError: not one position per token, or slots outside the user's tensor as far as the
            host can know. What only the device knows to be outside is not written.
    """
    _check_spec(tokens.device, spec)
    _write(spec, buffers, tokens, positions, start, keep, limit, median)


def _check_write(spec, buffers, tokens, positions, start, limit) -> None:
    _check_buffers(spec, buffers)
    _check_tokens(spec, buffers, tokens)
    n = tokens.shape[2]
    if positions is not None and positions.numel() != n:
        raise IndexError(f"hqmq: {n} tokens were written at {positions.numel()} positions")
    if positions is not None and positions.device != tokens.device:
        raise ValueError(f"positions on {positions.device}, but tokens on {tokens.device}")
    if positions is None and (start < 0 or (limit and start + n > limit)):
        raise IndexError(
            f"hqmq: slots {start}..{start + n - 1} are outside a cache of {limit} slots;"
            " allocate a longer cache"
        )


def _write(spec, buffers, tokens, positions, start, keep, limit, median) -> torch.Tensor | None:
    """The plan of the write (its first element is START before it); None if there is no token."""
    from . import write as windowed
    from . import write_now

    _check_write(spec, buffers, tokens, positions, start, limit)
    if not tokens.numel():
        return None
    if spec.window:
        cache = windowed.Cache(spec, buffers, tokens)
        return windowed.write_windowed([cache], positions, start, keep, limit)
    return write_now.write_now(spec, buffers, tokens, positions, start, keep, limit, median)


@_on_its_device
def write_both(
    key: torch.Tensor,
    value: torch.Tensor,
    key_spec: CacheSpec,
    key_buffers: Buffers,
    value_spec: CacheSpec,
    value_buffers: Buffers,
    medians: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    positions: torch.Tensor | None = None,
    start: int = 0,
    keep: int = 0,
    limit: int = 0,
) -> torch.Tensor | None:
    """`write` of keys and values, with a window in the same launches.

    Returns the plan of the write, whose first element is START of the keys before it; None if there
    is no token.
    """
    from . import write as windowed

    caches = (key_spec, key_buffers, key), (value_spec, value_buffers, value)
    _check_spec(key.device, key_spec, value_spec)
    if not all(spec.window for spec, *_ in caches):
        pairs = zip(caches, medians, strict=True)
        plans = [_write(*c, positions, start, keep, limit, median) for c, median in pairs]
        return plans[0]
    for cache in caches:
        _check_write(*cache, positions, start, limit)
    if not caches[0][2].numel():
        return None
    pair = [windowed.Cache(*cache) for cache in caches]
    return windowed.write_windowed(pair, positions, start, keep, limit)


@_on_its_device
def write_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor | None,
    start: int,
    keep: int,
    limit: int,
    key_buffers: Buffers,
    value_buffers: Buffers,
    first: int,
    length: int,
    key_median: torch.Tensor | None,
    value_median: torch.Tensor | None,
    exact: bool,
    key_spec: CacheSpec,
    value_spec: CacheSpec,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    fast: bool = True,
    opens: bool = True,
    closes: bool = True,
) -> torch.Tensor:
    """Write keys and values, and attend over logical slots first..first+length-1.

    Slots are counted before the write. With `exact`, attention sees the tokens of this call as they
    came; where all of them are still in the window afterwards, that is so anyway. Of several readers
    of one cache, the first `opens` and the last `closes`: one of these two writes.
    """
    _check(query, key_spec, key_buffers, value_spec, value_buffers)
    options = {"scale": scale, "mask": mask, "causal": causal, "softcap": softcap, "sinks": sinks}
    options["fast"] = fast
    caches = (key_spec, key_buffers, value_spec, value_buffers)
    n = key.shape[2]
    fresh = exact and n > min(key_spec.window, value_spec.window)
    out = None
    if fresh:
        _check_tokens(key_spec, key_buffers, key)
        _check_tokens(value_spec, value_buffers, value)
        alone = positions is None and start == first and (n == length or (causal and n < length))
        if alone and query.shape[2] > FEW_QUERIES:  # a first prefill
            out = _attend_fresh(query, key, value, length, options)
        else:
            out = _attend(
                query, *caches, first, length, key_buffers.state, (key, value), positions, start,
                options,
            )  # fmt: skip
    elif keep and n > 1 and n > min(key_spec.window, value_spec.window):
        seen = [
            _extended(spec, buffers, tokens, positions, start, keep)
            for spec, buffers, tokens in (
                (key_spec, key_buffers, key),
                (value_spec, value_buffers, value),
            )
        ]
        out = _attend(
            query, key_spec, seen[0], value_spec, seen[1], first, length, key_buffers.state,
            None, None, 0, options,
        )  # fmt: skip
    plan = None
    if closes if out is not None else opens:
        plan = write_both(
            key, value, key_spec, key_buffers, value_spec, value_buffers,
            (key_median, value_median), positions, start, keep, limit,
        )  # fmt: skip
    if out is not None:
        return out
    origin = key_buffers.state if plan is None else plan
    if keep and not opens:  # an earlier reader's write moved the window
        origin = origin[:1] - max(0, start + n - keep)
    return _attend(query, *caches, first, length, origin, None, None, 0, options)


@_on_its_device
def write_read(
    spec: CacheSpec,
    buffers: Buffers,
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    start: int,
    keep: int,
    limit: int,
    first: int,
    length: int,
    median: torch.Tensor | None,
    exact: bool,
) -> torch.Tensor:
    """Write `tokens`, and return logical slots first..first+length-1 dense `[B, H, length, D]`.

    As `write_attend` for a cache whose reader is no attention of ours: slots are counted before the
    write, and with `exact` the tokens of a call longer than the window are read as they came.
    """
    from . import read

    n = tokens.shape[2]
    out = tokens.new_empty(*tokens.shape[:2], length, spec.head_dim)
    place = (positions, start, keep, limit, median)
    if exact and n > spec.window:
        _check_spec(tokens.device, spec)
        _check_tokens(spec, buffers, tokens)
        read.dequantize(
            spec, buffers, first, length, out, origin=buffers.state, tokens=tokens,
            positions=positions, start=start,
        )  # fmt: skip
        _write(spec, buffers, tokens, *place)
    elif keep and n > max(spec.window, 1):
        seen = _extended(spec, buffers, tokens, positions, start, keep)
        read.dequantize(spec, seen, first, length, out, origin=buffers.state)
        _write(spec, buffers, tokens, *place)
    else:
        _check_spec(tokens.device, spec)
        plan = _write(spec, buffers, tokens, *place)
        origin = buffers.state if plan is None else plan
        read.dequantize(spec, buffers, first, length, out, origin=origin)
    return out


def _extended(spec, buffers, tokens, positions, start, keep) -> Buffers:
    """Copies with the tokens written and nothing evicted: a long call of a sliding window reads
    stored slots that its own write evicts. As `cache.write.extended`, without reading the state."""
    have = buffers.capacity // spec.block
    span = spec.block + (max(start, keep) if positions is None else keep) + tokens.shape[2]
    blocks = max(have, (span + spec.block - 1) // spec.block + 1)
    new = allocate(spec, *buffers.codes.shape[:2], blocks, tokens.device)
    order = buffers.state[START] // spec.block + torch.arange(have, device=tokens.device)
    for name, a, b in zip(Buffers._fields, buffers, new, strict=True):
        if name in PER_BLOCK and a.shape != b.shape:
            rows = a.shape[2] // have
            parts = a.unflatten(2, (have, rows)).index_select(2, order % have)
            b.unflatten(2, (blocks, rows)).index_copy_(2, order % blocks, parts)
        else:
            b.copy_(a)
    _write(spec, new, tokens, positions, start, 0, 0, None)
    return new


def _attend_fresh(query, key, value, length, options) -> torch.Tensor:
    from . import prefill

    mask = _mask4(options["mask"], query, length)
    if mask is not None:
        mask = mask[..., : key.shape[2]]
    key, value = key.to(query.dtype), value.to(query.dtype)
    options = {k: v for k, v in options.items() if k != "fast"} | {"mask": mask}
    return prefill.attend_dense(query, key, value, **options)
