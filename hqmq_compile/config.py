"""What a user can choose: the codec of the keys and of the values, and what surrounds them.

`HQMQConfig()` is the recommended 4-bit recipe, `HQMQConfig.preset(name)` the others. A config is a
frozen value: it is checked when it is made, written as JSON in torchao's format, and turned into
one `CacheSpec` for each cache tensor by `spec`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from hqmq_compile._fields import (
    VERSION,
    build,
    check_boolean,
    check_choice,
    check_integer,
    check_layers,
    check_number,
    close_match,
    encode,
    fields_of,
    listed,
)
from hqmq_compile.codec.codebook import UNIVERSAL_SIZES
from hqmq_compile.codec.spec import CHUNK, CacheSpec
from hqmq_compile.presets import PRESETS

CACHE_DTYPES = ("bfloat16", "float16", "float32", "float64")


class HQMQKernelPreference(enum.StrEnum):
    """Who computes the fused ops. Not named as torchao's enum, which its loader finds by name."""

    AUTO = "auto"  # Gluon on Hopper, else Triton on a GPU, else torch
    GLUON = "gluon"
    TRITON = "triton"
    TORCH = "torch"


KernelPreference = HQMQKernelPreference


@dataclasses.dataclass(frozen=True)
class CodecConfig:
    """How one chunk of four elements is stored: 24 x `secondary` directions, 2^`radius_bits` radii.

    `secondary` values that fill the index: 10, 21, 42, 85, 170, 341 for 8 to 13 bits. So "12+4" is
    `secondary=170, radius_bits=4`, one 16-bit word for four elements.

    Raises:
        ValueError: a value out of range, or a universal codebook that is not shipped.
    """

    secondary: int = 170
    radius_bits: int = 4
    codebook: str = "universal"  # one for all heads; "haar": random for each layer, head, role
    seed: int = 0
    scale: str = "log8"  # 8-bit log per 64 elements; "float16": one per token
    least_squares: bool = True  # the radius that minimises the error; False: the norm (paper)
    zero_level: bool = False  # True: the lowest radius level is zero (paper)

    def __post_init__(self) -> None:
        check_integer(self, "secondary", low=1)
        check_integer(self, "radius_bits", low=1, high=8)
        check_integer(self, "seed", low=0)
        check_choice(self, "codebook", ("universal", "haar"))
        check_choice(self, "scale", ("log8", "float16"))
        check_boolean(self, "least_squares")
        check_boolean(self, "zero_level")
        if self.codebook == "universal" and self.secondary not in UNIVERSAL_SIZES:
            raise ValueError(
                f"CodecConfig.secondary={self.secondary} has no universal codebook; use one of "
                f"{', '.join(map(str, UNIVERSAL_SIZES))}, or codebook='haar' for any size"
            )

    @property
    def index_bits(self) -> int:
        """Bits of the codeword index."""
        return math.ceil(math.log2(24 * self.secondary))


@dataclasses.dataclass(frozen=True)
class Med3xConfig:
    """Med3x: chunks far longer than the median chunk are kept apart as outliers.

    Raises:
        ValueError: a value out of range or an unknown role.
    """

    multiplier: float = 3.0  # a chunk longer than this many medians is an outlier
    scope: str = "token"  # the median of one token and head; "batch": of the whole write (paper)
    roles: tuple[str, ...] | list[str] = ("key",)  # stored as a list, as JSON has it
    outliers: str = "int8x4"  # one power of two per 32-token tile; "16bit": as they came (paper)
    flag: str = "escape"  # radius level 0 marks an outlier; "bit": one more bit a chunk (paper)
    pool: float = 0.125  # room for outliers, as a fraction of a block's chunks

    def __post_init__(self) -> None:
        check_number(self, "multiplier", low=0.0)
        check_number(self, "pool", low=0.0, high=1.0)
        check_choice(self, "scope", ("token", "batch"))
        check_choice(self, "outliers", ("int8x4", "16bit"))
        check_choice(self, "flag", ("escape", "bit"))
        given = (self.roles,) if isinstance(self.roles, str) else self.roles
        unknown = [role for role in given if role not in ("key", "value")]
        if unknown or not given:
            raise ValueError(
                f"Med3xConfig.roles is {self.roles!r}: name 'key', 'value' or both "
                "(to switch Med3x off, set HQMQConfig.med3x to None)"
            )
        roles = [role for role in ("key", "value") if role in given]
        object.__setattr__(self, "roles", roles)  # torchao's encoder refuses tuples

    def __hash__(self) -> int:
        return hash((self.multiplier, self.scope, tuple(self.roles), self.outliers, self.flag))


@dataclasses.dataclass(frozen=True)
class HQMQConfig:
    """How KV caches are kept: an `AOBaseConfig` of torchao wherever torchao is imported.

    Args:
        key: codec of the keys; a `CodecConfig` or a dict of its fields.
        value: codec of the values, likewise.
        med3x: outlier handling, or None to switch it off.
        center: what is subtracted from the keys before coding: "block" (the mean of each block),
            "first" (the mean of the first write, which softmax cancels) or "none".
        rotate: signed Hadamard rotation of the keys. Helps only with a mean and without Med3x.
        sink_tokens: first tokens kept as they came.
        window: newest tokens kept as they came, at least this many and at most `block` more.
            0 packs every token as it is written: then center "block" acts as "first" and outliers
            are kept in 16 bits (`resolved`).
        block: tokens packed together; a multiple of 8.
        prefill: what attention sees of the tokens of the current call: "exact" (as they came) or
            "stored" (as they will be read back).
        kernel: who computes; `KernelPreference`.
        layers: exceptions, by index of the attention in the model: None leaves that layer's cache
            in 16 bits, a dict replaces fields, as in `{0: {"key": {"secondary": 341}}, 5: None}`.
        version: of this format.

    Raises:
        ValueError: one sentence that names the field, the value, and what is possible.
    """

    key: CodecConfig = CodecConfig()
    value: CodecConfig = CodecConfig(secondary=42, radius_bits=3)
    med3x: Med3xConfig | None = Med3xConfig()
    center: str = "block"
    rotate: bool = False
    sink_tokens: int = 4
    window: int = 64
    block: int = 64
    prefill: str = "exact"
    kernel: HQMQKernelPreference = HQMQKernelPreference.AUTO
    layers: Mapping[int, Mapping[str, Any] | None] = dataclasses.field(default_factory=dict)
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(
                f"HQMQConfig.version is {self.version!r}, but this hqmq-compile reads version "
                f"{VERSION}; install the release that wrote the config, or write it anew"
            )
        for name, cls in (("key", CodecConfig), ("value", CodecConfig), ("med3x", Med3xConfig)):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                object.__setattr__(self, name, build(cls, given))
            elif not isinstance(given, cls) and not (name == "med3x" and given is None):
                raise ValueError(
                    f"HQMQConfig.{name} is {given!r}: give a {cls.__name__} or a dict of its fields"
                )
        check_choice(self, "center", ("block", "first", "none"))
        check_choice(self, "prefill", ("exact", "stored"))
        check_boolean(self, "rotate")
        check_integer(self, "sink_tokens", low=0)
        check_integer(self, "window", low=0)
        check_integer(self, "block", low=8)
        if self.block % 8:
            raise ValueError(f"HQMQConfig.block is {self.block}: it must be a multiple of 8")
        if isinstance(self.kernel, Mapping):  # {"_type": ..., "_data": "AUTO"}
            kernel = str(self.kernel.get("_data")).lower()
            object.__setattr__(self, "kernel", kernel)
        check_choice(self, "kernel", tuple(k.value for k in HQMQKernelPreference))
        object.__setattr__(self, "kernel", HQMQKernelPreference(self.kernel))
        for role in ("key", "value"):
            self._check_word(role)
        object.__setattr__(self, "layers", check_layers(self.layers, _LAYER_FIELDS))
        for layer in self.layers:
            try:
                self.for_layer(layer)
            except ValueError as error:
                raise ValueError(f"HQMQConfig.layers[{layer}]: {error}") from None

    def _check_word(self, role: str) -> None:
        codec, outliers = getattr(self, role), self._med3x_of(role)
        flag = bool(outliers) and outliers.flag == "bit"
        bits = codec.index_bits + codec.radius_bits + flag
        if not 4 <= bits <= 24:
            raise ValueError(
                f"HQMQConfig.{role}: {codec.index_bits} index bits + {codec.radius_bits} radius "
                f"bits{' + 1 flag bit' if flag else ''} = {bits} bits a chunk; 4 to 24 can be "
                "stored, so choose another secondary or radius_bits"
            )
        if codec.zero_level and outliers and outliers.flag == "escape":
            raise ValueError(
                f"HQMQConfig.{role}: zero_level needs radius level 0, which marks outliers with "
                "flag='escape'; use Med3xConfig(flag='bit') or zero_level=False"
            )

    def _med3x_of(self, role: str) -> Med3xConfig | None:
        return self.med3x if self.med3x and role in self.med3x.roles else None

    def __hash__(self) -> int:
        return hash(self.to_json())

    # -- use -------------------------------------------------------------------------------------
    def for_layer(self, layer: int) -> HQMQConfig | None:
        """The config of one layer, without exceptions left; None if it stays in 16 bits."""
        changes = self.layers.get(layer, {})
        if changes is None:
            return None
        merged = {}
        for name, change in changes.items():
            base = getattr(self, name)
            if isinstance(change, Mapping):
                cls = Med3xConfig if name == "med3x" else CodecConfig
                change = build(cls, {**(fields_of(base) if base else {}), **change})
            merged[name] = change
        return dataclasses.replace(self, layers={}, **merged)

    def resolved(self) -> HQMQConfig:
        """What `window=0` makes of the fields that need a window; otherwise the config itself."""
        if self.window:
            return self
        changes: dict[str, Any] = {}
        if self.center == "block":  # a block's mean is known only when the block is full
            changes["center"] = "first"
        if self.med3x and self.med3x.outliers == "int8x4":  # so is the exponent of a tile
            changes["med3x"] = dataclasses.replace(self.med3x, outliers="16bit")
        return dataclasses.replace(self, **changes) if changes else self

    def spec(
        self,
        role: str,
        head_dim: int,
        dtype: torch.dtype | str,
        layer: int = 0,
        first_head: int = 0,
    ) -> CacheSpec | None:
        """Codec and layout of the cache tensor of one layer.

        Args:
            role: "key" or "value".
            head_dim: its last dimension.
            dtype: of the user's cache tensor.
            layer: index of the attention in the model.
            first_head: number of its first KV head in the model, where ranks hold some heads each.

        Returns:
            The spec, or None where `layers` leaves the layer in 16 bits.

        Raises:
            ValueError: the head dimension or dtype cannot be coded.
        """
        if role not in ("key", "value"):
            raise ValueError(f"role is {role!r}: it must be 'key' or 'value'")
        config = self.for_layer(layer)
        if config is None:
            return None
        config = config.resolved()
        is_key = role == "key"
        if head_dim <= 0 or head_dim % CHUNK:
            raise ValueError(
                f"head dimension {head_dim} is not a multiple of {CHUNK}: HQMQ codes elements in "
                f"quaternions; leave this layer out with layers={{{layer}: None}}"
            )
        if config.rotate and is_key and head_dim & (head_dim - 1):
            raise ValueError(
                f"rotate=True needs a head dimension that is a power of two, not {head_dim}; "
                "set rotate=False"
            )
        name = str(dtype).removeprefix("torch.")
        if name not in CACHE_DTYPES:
            raise ValueError(f"a {name} cache cannot be packed: use {', '.join(CACHE_DTYPES)}")
        codec, outliers = getattr(config, role), config._med3x_of(role)
        fields = fields_of(codec) | {
            "role": role,
            "head_dim": head_dim,
            "dtype": name,
            # Only random codebooks differ by layer and head; otherwise these share tables and kernels.
            "layer": layer if codec.codebook == "haar" else 0,
            "first_head": first_head if codec.codebook == "haar" else 0,
            "center": config.center if is_key else "none",
            "rotate": config.rotate and is_key,
            "sink_tokens": config.sink_tokens,
            "window": config.window,
            "block": config.block,
        }
        if outliers:
            fields |= {
                "med3x": float(outliers.multiplier),
                "med3x_scope": outliers.scope,
                "outliers": outliers.outliers,
                "outlier_flag": outliers.flag,
                "pool": float(outliers.pool),
            }
        return CacheSpec(**fields)

    # -- making and writing ----------------------------------------------------------------------
    @classmethod
    def preset(cls, name: str, **changes: Any) -> HQMQConfig:
        """A named recipe, with any field replaced: `HQMQConfig.preset("3bit", window=128)`.

        "4bit" (the default), "3bit" and "5bit" by stored bits; "paper" is the paper's recipe with
        S = 96 and 4 radius bits, and "s24_r3" to "s192_r6" are its other published sizes.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"no preset {name!r}{close_match(name, PRESETS)}: {listed(PRESETS)}")
        return build(cls, {**PRESETS[name], **changes})

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names that `preset` takes."""
        return tuple(PRESETS)

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> HQMQConfig:
        """The config in the backend's own options: {"config": ...} or {"preset": name}, or neither.

        `config` may be an `HQMQConfig`, a dict (plain fields or torchao's format) or JSON.
        """
        options = dict(options or {})
        known = ("config", "preset")
        for key in options:
            if key not in known:
                raise ValueError(
                    f"unknown option {key!r}{close_match(key, known)}: {listed(known)}"
                )
        if len(options) == 2:
            raise ValueError(
                "options has both 'config' and 'preset': give one, or config=HQMQConfig.preset("
                "name, field=value)"
            )
        if "preset" in options:
            return cls.preset(options["preset"])
        config = options.get("config")
        if config is None or isinstance(config, cls):
            return config or cls()
        if isinstance(config, str):
            return cls.from_json(config)
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        raise ValueError(
            f"options['config'] is a {type(config).__name__}: give an HQMQConfig, a dict or JSON"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types in the format of torchao's `config_to_dict`, made without torchao."""
        data = {name: encode(value) for name, value in fields_of(self).items() if name != "version"}
        return {"_type": "HQMQConfig", "_version": self.version, "_data": data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HQMQConfig:
        """From `to_dict`, torchao's `config_to_dict`, or plain fields: {"window": 0}."""
        return build(cls, data)

    def to_json(self, **kwargs: Any) -> str:
        """`to_dict` as text; keyword arguments go to `json.dumps`."""
        return json.dumps(self.to_dict(), **kwargs)

    @classmethod
    def from_json(cls, text: str) -> HQMQConfig:
        """From `to_json`.

        Raises:
            ValueError: not JSON, not an object, or not a config.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the HQMQ config is not JSON ({error}): {text[:60]!r}") from None
        return cls.from_dict(data)


_LAYER_FIELDS = ("key", "value", "med3x", "center", "rotate", "sink_tokens", "window", "block")
