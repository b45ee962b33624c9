"""Checks of config fields, one sentence each, and configs as dicts in torchao's format."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any

VERSION = 1  # of the format of every config


def fields_of(config: Any) -> dict[str, Any]:
    """Field values by name, not copied and not recursive as `dataclasses.asdict` is."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def listed(names: Iterable[str]) -> str:
    """The end of an error that lists what is possible."""
    return f"choose from {', '.join(names)}"


def close_match(name: object, known: Iterable[str]) -> str:
    """ " (did you mean 'window'?)", or nothing."""
    match = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _fail(config: Any, name: str, wanted: str) -> None:
    raise ValueError(f"{type(config).__name__}.{name} is {getattr(config, name)!r}: {wanted}")


def check_choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless the field is one of `allowed`."""
    value = getattr(config, name)
    if not isinstance(value, str) or value not in allowed:
        _fail(config, name, f"it must be one of {', '.join(map(repr, allowed))}")


def check_boolean(config: Any, name: str) -> None:
    """Raises ValueError unless the field is a bool."""
    if not isinstance(getattr(config, name), bool):
        _fail(config, name, "it must be True or False")


def check_integer(config: Any, name: str, low: int, high: int | None = None) -> None:
    """Raises ValueError unless the field is an int within the limits."""
    value = getattr(config, name)
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value
    if not fits or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        _fail(config, name, f"it must be a whole number {limit}")


def check_number(config: Any, name: str, low: float, high: float = math.inf) -> None:
    """Raises ValueError unless the field is a finite number in (low, high]."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        limit = "above 0" if high == math.inf else f"above 0 and at most {high:g}"
        _fail(config, name, f"it must be a number {limit}")
    if value == math.inf:
        _fail(config, name, "it must be finite (to switch Med3x off, set med3x to None)")


def check_layers(layers: Any, allowed: tuple[str, ...]) -> dict[int, dict[str, Any] | None]:
    """Exceptions with whole-number keys (JSON has strings) and nothing but JSON types inside."""
    if not isinstance(layers, Mapping):
        raise ValueError(f"HQMQConfig.layers is {layers!r}: give a dict of layer index to fields")
    result: dict[int, dict[str, Any] | None] = {}
    for layer, changes in layers.items():
        if not str(layer).isdecimal():
            raise ValueError(f"HQMQConfig.layers has the key {layer!r}: give a layer index from 0")
        if changes is not None and not isinstance(changes, Mapping):
            raise ValueError(
                f"HQMQConfig.layers[{layer}] is {changes!r}: give None or a dict of fields"
            )
        for name in changes or {}:
            if name not in allowed:
                guess = close_match(name, allowed)
                raise ValueError(
                    f"HQMQConfig.layers[{layer}] sets {name!r}{guess}; "
                    f"a layer can set {', '.join(allowed)}"
                )
        plain = {
            name: fields_of(value) if dataclasses.is_dataclass(value) else value
            for name, value in (changes or {}).items()
        }
        result[int(layer)] = None if changes is None else plain
    return dict(sorted(result.items()))


def encode(value: Any) -> Any:
    """JSON types, as torchao's `config_to_dict` writes them."""
    if isinstance(value, enum.Enum):
        return {"_type": type(value).__name__, "_data": value.name}
    if dataclasses.is_dataclass(value):
        data = {name: encode(v) for name, v in fields_of(value).items()}
        return {"_type": type(value).__name__, "_version": VERSION, "_data": data}
    if isinstance(value, Mapping):
        return {str(name): encode(v) for name, v in value.items()}
    return value


def build(cls: type, data: Any) -> Any:
    """An object of `cls` from a dict, plain or tagged with its type, with unknown keys refused."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__} is read from a dict, not from {data!r}")
    known = [f.name for f in dataclasses.fields(cls)]
    if "_type" in data or "_data" in data:
        if data.get("_type") != cls.__name__ or not isinstance(data.get("_data"), Mapping):
            raise ValueError(f"expected a {cls.__name__}, found one of type {data.get('_type')!r}")
        version = {"version": data.get("_version", VERSION)} if "version" in known else {}
        data = {**data["_data"], **version}
    for name in data:
        if name not in known:
            raise ValueError(
                f"{cls.__name__} has no field {name!r}{close_match(name, known)}; "
                f"its fields are {', '.join(known)}"
            )
    return cls(**data)
