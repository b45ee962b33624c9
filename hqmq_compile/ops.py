"""The custom ops: schemas, shapes for tracing, and dispatch to a kernel or to the reference.

The only door to `kernels/`. Every op takes the eight buffers of a packed cache (`cache/buffers.py`)
as separate tensors and declares the ones it mutates; the `CacheSpec` travels as a string.

Attention and its cache update are one op (`write_attend`): as two, inductor clones the whole cache
in some graphs (`graphs.md`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from .cache import attend as _attend
from .cache import write as _write
from .cache.buffers import FIELDS, LENGTH, START, Buffers
from .cache.read import dequantize as _dequantize
from .codec.spec import CacheSpec

log = logging.getLogger("hqmq.ops")

_library = torch.library.Library("hqmq", "DEF")


def _buffer_args(prefix: str, alias: str, mutated: bool) -> str:
    return ", ".join(
        f"Tensor({alias}{i}!) {prefix}{name}" if mutated else f"Tensor {prefix}{name}"
        for i, name in enumerate(Buffers._fields)
    )


_SLOTS = "Tensor? positions, SymInt start, SymInt keep, SymInt limit"
_ATTEND = "Tensor? mask, Tensor? sinks, SymInt first, SymInt length, float scale, bool causal, float softcap"
SCHEMAS = {
    # tokens [B, H, n, D] go to logical slots `positions` (int [n]), or start..start+n-1; `keep` > 0
    # leaves only the newest slots; `limit` > 0 is the length of the user's tensor; attention reads
    # logical slots first..first+length-1, counted before the write.
    "write_attend": f"(Tensor query, Tensor key, Tensor value, {_SLOTS}, "
    f"{_buffer_args('key_', 'a', True)}, {_buffer_args('value_', 'b', True)}, {_ATTEND}, "
    "Tensor? key_median, Tensor? value_median, bool exact, str key_spec, str value_spec, str kernel,"
    # Of several attentions over one cache each is one call, in their order; it is written once.
    " bool first_reader=True, bool last_reader=True) -> Tensor",
    # The write, then logical slots first..first+length-1 (counted before it) as a dense tensor: for
    # attention that no kernel here can do.
    "write_read": f"(Tensor tokens, {_SLOTS}, {_buffer_args('', 'a', True)}, SymInt first, SymInt length,"
    " Tensor? median, bool exact, str spec, str kernel) -> Tensor",
    "write": f"(Tensor tokens, {_SLOTS}, {_buffer_args('', 'a', True)}, Tensor? median, str spec,"
    " str kernel) -> ()",
    "append": f"(Tensor tokens, SymInt keep, {_buffer_args('', 'a', True)}, Tensor? median, str spec,"
    " str kernel) -> ()",
    "attend": f"(Tensor query, {_buffer_args('key_', 'a', False)}, {_buffer_args('value_', 'b', False)},"
    f" {_ATTEND}, str key_spec, str value_spec, str kernel) -> Tensor",
    "dequantize": f"({_buffer_args('', 'a', False)}, SymInt length, str spec) -> Tensor",
}
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.needs_fixed_stride_order,))


def _implement(name: str):
    def register(function):
        # Dynamo must not look inside: the op is one node, whoever runs it.
        _library.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
        return function

    return register


@functools.cache
def _log_once(message: str) -> None:
    log.warning(message)


def _use_triton(kernel: str, device: torch.device, *specs: CacheSpec) -> bool:
    """Whether the Triton kernels serve this call; says once why not where a GPU would like them."""
    if kernel == "torch" or (kernel == "auto" and device.type == "cpu"):
        return False
    from .kernels import launch

    reasons = (launch.why_not(device, spec) for spec in specs)
    reason = next((r for r in reasons if r), None)
    if reason:
        _log_once(f"hqmq: falling back to the plain torch ops: {reason}")
    return reason is None


def _fused(kernel: str, query: torch.Tensor, heads: int, *specs: CacheSpec) -> Callable | None:
    """What reads the codes for this attention on the CPU, or None: decode them; says once why."""
    if kernel == "torch" or query.device.type != "cpu":
        return None
    from .kernels import cpu

    if query.shape[1] // heads * query.shape[2] > cpu.MAX_ROWS:
        return None  # many rows are served better by decoding once
    reason = next((r for r in map(cpu.why_not, specs) if r), None)
    if reason:
        _log_once(f"hqmq: falling back to the plain torch ops: {reason}")
        return None
    from .kernels.cpu_tile import read_tile

    return read_tile


def served_by(kernel: str, device: torch.device, spec: CacheSpec) -> str:
    """What computes attention of few query tokens to a cache: "C++", "Triton", or "plain torch: why"."""
    if kernel == "torch":
        return "plain torch: kernel='torch'"
    if kernel == "auto" and device.type == "cpu":
        from .kernels import cpu

        reason = cpu.why_not(spec)
        return f"plain torch: {reason}" if reason else "C++"
    from .kernels import launch

    reason = launch.why_not(device, spec)
    return f"plain torch: {reason}" if reason else "Triton"


def _consecutive(positions: torch.Tensor | None, start: int, count: int) -> int | None:
    """The first slot if the slots follow each other, else None."""
    if positions is None:
        return start
    slots = positions.tolist()
    if len(slots) != count:
        raise IndexError(f"hqmq: {count} tokens were written at {len(slots)} positions")
    return slots[0] if slots == list(range(slots[0], slots[0] + len(slots))) else None


@_implement("write_attend")
def _write_attend(query, key, value, positions, start, keep, limit, *rest):
    key_buffers, value_buffers = Buffers(*rest[:FIELDS]), Buffers(*rest[FIELDS : 2 * FIELDS])
    mask, sinks, first, length, scale, causal, softcap = rest[2 * FIELDS : 2 * FIELDS + 7]
    key_median, value_median, exact, key_spec, value_spec, kernel, *turn = rest[2 * FIELDS + 7 :]
    opens, closes = [*turn, True, True][:2]  # trailing defaults are not passed
    key_spec, value_spec = CacheSpec.parse(key_spec), CacheSpec.parse(value_spec)
    options = {"scale": scale, "mask": mask, "causal": causal, "softcap": softcap, "sinks": sinks}
    if _use_triton(kernel, query.device, key_spec, value_spec):
        from .kernels import launch

        return launch.write_attend(
            query, key, value, positions, start, keep, limit, key_buffers, value_buffers,
            first, length, key_median, value_median, exact, key_spec, value_spec,
            opens=opens, closes=closes, fast=kernel != "triton", **options,
        )  # fmt: skip

    def store() -> None:
        for spec, buffers, tokens, median in (
            (key_spec, key_buffers, key, key_median),
            (value_spec, value_buffers, value, value_median),
        ):
            _write_reference(spec, buffers, tokens, positions, start, keep, limit, median)

    origin = int(key_buffers.state[START])
    slot = _consecutive(positions, start, key.shape[2])
    long = key.shape[2] > min(key_spec.window, value_spec.window)
    ahead = exact and long and slot is not None or long and keep > 0
    if keep and not ahead and not opens:  # an earlier reader's write moved the window
        origin -= max(0, start + key.shape[2] - keep)
    fresh, seen = None, (key_buffers, value_buffers)
    if exact and long and slot is not None:
        fresh = _attend.Fresh(key, value, origin + slot)
    elif long and keep:  # the call reads stored slots that its own write evicts
        seen = tuple(
            _write.extended(spec, buffers, tokens, slot)
            for spec, buffers, tokens in (
                (key_spec, key_buffers, key),
                (value_spec, value_buffers, value),
            )
        )
    elif opens:
        store()
    fused = _fused(kernel, query, key.shape[1], key_spec, value_spec)
    out = _attend.attend(
        query, key_spec, seen[0], value_spec, seen[1], origin + first, length,
        fresh=fresh, fused=fused, **options,
    )  # fmt: skip
    if ahead and closes:
        store()
    return out


@_implement("write_read")
def _write_read(tokens, positions, start, keep, limit, *rest):
    buffers, (first, length, median, exact, spec, kernel) = Buffers(*rest[:FIELDS]), rest[FIELDS:]
    spec, count = CacheSpec.parse(spec), tokens.shape[2]
    if _use_triton(kernel, tokens.device, spec):
        from .kernels import launch

        return launch.write_read(
            spec, buffers, tokens, positions, start, keep, limit, first, length, median, exact
        )
    slot = _consecutive(positions, start, count)
    place = (spec, buffers, tokens, positions, start, keep, limit, median)
    begin = int(buffers.state[START]) + first
    if exact and count > spec.window and slot is not None:
        out = _dequantize(spec, buffers, length, start=begin)
        a, b = max(slot - first, 0), min(slot - first + count, length)
        out[:, :, a:b] = tokens[:, :, a + first - slot : b + first - slot]
    elif count > spec.window and keep:  # the call reads stored slots that its own write evicts
        out = _dequantize(spec, _write.extended(spec, buffers, tokens, slot), length, start=begin)
    else:
        _write_reference(*place)
        return _dequantize(spec, buffers, length, start=begin)
    _write_reference(*place)
    return out


def _write_reference(spec, buffers, tokens, positions, start, keep, limit, median) -> None:
    slot = _consecutive(positions, start, tokens.shape[2])
    if slot is not None:
        _write.write(spec, buffers, tokens, slot, keep, median, limit)
    else:
        _write.write_slots(spec, buffers, tokens, positions, keep, median, limit)


@_implement("write")
def _write_op(tokens, positions, start, keep, limit, *rest):
    buffers, (median, spec, kernel) = Buffers(*rest[:FIELDS]), rest[FIELDS:]
    spec = CacheSpec.parse(spec)
    if _use_triton(kernel, tokens.device, spec):
        from .kernels import launch

        launch.write(spec, buffers, tokens, positions, start, keep, limit, median)
    else:
        _write_reference(spec, buffers, tokens, positions, start, keep, limit, median)


@_implement("append")
def _append(tokens, keep, *rest):
    buffers, (median, spec, _) = Buffers(*rest[:FIELDS]), rest[FIELDS:]
    state = buffers.state.tolist()
    _write.write(CacheSpec.parse(spec), buffers, tokens, state[LENGTH] - state[START], keep, median)


@_implement("attend")
def _attend_op(query, *rest):
    key_buffers, value_buffers = Buffers(*rest[:FIELDS]), Buffers(*rest[FIELDS : 2 * FIELDS])
    mask, sinks, first, length, scale, causal, softcap, key_spec, value_spec, kernel = rest[
        2 * FIELDS :
    ]
    key_spec, value_spec = CacheSpec.parse(key_spec), CacheSpec.parse(value_spec)
    options = {"scale": scale, "mask": mask, "causal": causal, "softcap": softcap, "sinks": sinks}
    if _use_triton(kernel, query.device, key_spec, value_spec):
        from .kernels import launch

        return launch.attend(
            query, key_spec, key_buffers, value_spec, value_buffers, first, length,
            fast=kernel != "triton", **options,
        )  # fmt: skip
    origin = int(key_buffers.state[START])
    return _attend.attend(
        query, key_spec, key_buffers, value_spec, value_buffers, origin + first, length,
        fused=_fused(kernel, query, key_buffers.codes.shape[1], key_spec, value_spec), **options,
    )  # fmt: skip


@_implement("dequantize")
def _dequantize_op(*args):
    return _dequantize(CacheSpec.parse(args[-1]), Buffers(*args[:FIELDS]), args[-2])


# -- shapes for tracing ----------------------------------------------------------------------------
@torch.library.register_fake("hqmq::write_attend", lib=_library)
def _(query, key, value, *rest):
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.register_fake("hqmq::write_read", lib=_library)
def _(tokens, *rest):
    length = rest[4 + FIELDS + 1]
    return tokens.new_empty((*tokens.shape[:2], length, tokens.shape[3]))


@torch.library.register_fake("hqmq::attend", lib=_library)
def _(query, *rest):
    value_spec = CacheSpec.parse(rest[-2])
    return query.new_empty((*query.shape[:-1], value_spec.head_dim))


@torch.library.register_fake("hqmq::write", lib=_library)
@torch.library.register_fake("hqmq::append", lib=_library)
def _(*args):
    return None


@torch.library.register_fake("hqmq::dequantize", lib=_library)
def _(*args):
    spec, codes = CacheSpec.parse(args[-1]), args[0]
    return codes.new_empty((*codes.shape[:2], args[-2], spec.head_dim), dtype=spec.torch_dtype)
