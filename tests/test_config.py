"""`HQMQConfig`: what it accepts, what it refuses and how it says so, and what it becomes."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
import torch

from hqmq_compile.codec import codebook
from hqmq_compile.codec.spec import CacheSpec
from hqmq_compile.config import CodecConfig, HQMQConfig, KernelPreference, Med3xConfig


# -- what is refused: one ValueError, which names the field and what is possible -------------------
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CodecConfig(secondary=0), r"secondary is 0: .* at least 1"),
        (lambda: CodecConfig(secondary=2.5), r"secondary is 2.5: it must be a whole number"),
        (lambda: CodecConfig(secondary=96), r"secondary=96 has no universal .* 85, 170.*haar"),
        (lambda: CodecConfig(radius_bits=0), r"radius_bits is 0: .* from 1 to 8"),
        (lambda: CodecConfig(radius_bits=9), r"radius_bits is 9: .* from 1 to 8"),
        (lambda: CodecConfig(radius_bits=True), r"radius_bits is True"),
        (lambda: CodecConfig(codebook="lloyd"), r"codebook is 'lloyd': .*'universal', 'haar'"),
        (lambda: CodecConfig(scale="fp8"), r"scale is 'fp8': .*'log8', 'float16'"),
        (lambda: CodecConfig(zero_level=1), r"zero_level is 1: it must be True or False"),
        (lambda: Med3xConfig(multiplier=0), r"multiplier is 0: .* above 0"),
        (lambda: Med3xConfig(multiplier=float("inf")), r"multiplier is inf: .* med3x to None"),
        (lambda: Med3xConfig(multiplier=float("nan")), r"multiplier is nan"),
        (lambda: Med3xConfig(pool=1.5), r"pool is 1.5: .* at most 1"),
        (lambda: Med3xConfig(scope="layer"), r"scope is 'layer': .*'token', 'batch'"),
        (lambda: Med3xConfig(outliers="fp8"), r"outliers is 'fp8'"),
        (lambda: Med3xConfig(flag="none"), r"flag is 'none'"),
        (lambda: Med3xConfig(roles=("query",)), r"roles is \('query',\): name 'key'"),
        (lambda: Med3xConfig(roles=()), r"roles is \(\): .* set HQMQConfig.med3x to None"),
        (lambda: HQMQConfig(key=4), r"key is 4: give a CodecConfig or a dict"),
        (lambda: HQMQConfig(med3x=True), r"med3x is True: give a Med3xConfig or a dict"),
        (lambda: HQMQConfig(center="mean"), r"center is 'mean': .*'block', 'first', 'none'"),
        (lambda: HQMQConfig(window=-1), r"window is -1: .* at least 0"),
        (lambda: HQMQConfig(window=None), r"window is None"),
        (lambda: HQMQConfig(block=12), r"block is 12: it must be a multiple of 8"),
        (lambda: HQMQConfig(block=0), r"block is 0: .* at least 8"),
        (lambda: HQMQConfig(sink_tokens=-4), r"sink_tokens is -4"),
        (lambda: HQMQConfig(rotate="yes"), r"rotate is 'yes'"),
        (lambda: HQMQConfig(prefill="lossy"), r"prefill is 'lossy': .*'exact', 'stored'"),
        (lambda: HQMQConfig(kernel="cuda"), r"kernel is 'cuda': .*'auto', 'gluon', 'triton'"),
        (lambda: HQMQConfig(version=2), r"version is 2, but this hqmq-compile reads version 1"),
        (lambda: HQMQConfig(layers=[0]), r"layers is \[0\]: give a dict"),
        (lambda: HQMQConfig(layers={-1: None}), r"layers has the key -1: give a layer index"),
        (lambda: HQMQConfig(layers={0: False}), r"layers\[0\] is False: give None or a dict"),
        (lambda: HQMQConfig(layers={0: {"prefill": "exact"}}), r"layers\[0\] sets 'prefill'"),
        (lambda: HQMQConfig(layers={3: {"windw": 1}}), r"layers\[3\].*did you mean 'window'"),
        (lambda: HQMQConfig(layers={3: {"block": 9}}), r"layers\[3\]: .*block is 9: .*multiple"),
        (
            lambda: HQMQConfig(key=CodecConfig(secondary=2**20, codebook="haar", radius_bits=8)),
            r"key: 25 index bits \+ 8 radius bits = 33 bits a chunk; 4 to 24",
        ),
        (
            lambda: HQMQConfig(
                key=CodecConfig(secondary=1000, codebook="haar", radius_bits=8),
                med3x=Med3xConfig(flag="bit"),
                value={"secondary": 2000, "codebook": "haar", "radius_bits": 9},
            ),
            r"radius_bits is 9",
        ),
        (
            lambda: HQMQConfig(
                key=CodecConfig(secondary=2730, codebook="haar", radius_bits=8),
                med3x=Med3xConfig(flag="bit"),
            ),
            r"16 index bits \+ 8 radius bits \+ 1 flag bit = 25 bits",
        ),
        (
            lambda: HQMQConfig(key=CodecConfig(zero_level=True)),
            r"key: zero_level needs radius level 0.*flag='bit'",
        ),
        (
            lambda: HQMQConfig.preset("4-bit"),
            r"no preset '4-bit' \(did you mean '4bit'\?\): .*paper",
        ),
        (lambda: HQMQConfig.preset(4), r"no preset 4"),
        (lambda: HQMQConfig.preset("3bit", windows=3), r"no field 'windows' .*'window'"),
        (
            lambda: HQMQConfig.from_dict({"windw": 3}),
            r"no field 'windw' \(did you mean 'window'\?\)",
        ),
        (lambda: HQMQConfig.from_dict({"key": {"bits": 3}}), r"CodecConfig has no field 'bits'"),
        (lambda: HQMQConfig.from_dict({"_type": "Int4", "_data": {}}), r"found one of type 'Int4'"),
        (lambda: HQMQConfig.from_dict([1]), r"read from a dict, not from \[1\]"),
        (lambda: HQMQConfig.from_json("{"), r"not JSON"),
        (lambda: HQMQConfig.from_json("null"), r"not from None"),
        (
            lambda: HQMQConfig.from_options({"presets": "4bit"}),
            r"unknown option 'presets' .*'preset'",
        ),
        (lambda: HQMQConfig.from_options({"config": 4}), r"\['config'\] is a int"),
        (
            lambda: HQMQConfig.from_options({"config": HQMQConfig(), "preset": "4bit"}),
            r"both 'config' and 'preset'",
        ),
    ],
)
def test_refuses_in_one_clear_error(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (
            {},
            ("key", 70, "bfloat16"),
            r"head dimension 70 is not a multiple of 4.*layers=\{0: None",
        ),
        ({}, ("key", 0, "bfloat16"), r"head dimension 0"),
        ({"rotate": True}, ("key", 96, "bfloat16"), r"power of two, not 96; set rotate=False"),
        ({}, ("query", 64, "bfloat16"), r"role is 'query'"),
        ({}, ("key", 64, torch.float8_e4m3fn), r"a float8_e4m3fn cache cannot be packed"),
        ({}, ("key", 64, torch.int8), r"a int8 cache cannot be packed"),
    ],
)
def test_spec_refuses_in_one_clear_error(change, arguments, message):
    with pytest.raises(ValueError, match=message):
        HQMQConfig(**change).spec(*arguments)


# -- presets -------------------------------------------------------------------------------------
def test_default_is_the_recommended_recipe():
    config = HQMQConfig()
    assert config == HQMQConfig.preset("4bit") == HQMQConfig.from_options(None)
    key, value = (config.spec(role, 128, torch.bfloat16) for role in ("key", "value"))
    assert (key.index_bits, key.radius_bits, key.word_bits) == (12, 4, 16)
    assert (value.index_bits, value.radius_bits, value.word_bits) == (10, 3, 13)
    assert (key.med3x, key.outliers, key.outlier_flag) == (3.0, "int8x4", "escape")
    assert value.med3x == 0.0
    assert (key.center, value.center) == ("block", "none")
    assert (key.sink_tokens, key.window, key.block) == (4, 64, 64)
    assert config.prefill == "exact"


@pytest.mark.parametrize(
    ("name", "key_bits", "value_bits"), [("3bit", 13, 11), ("4bit", 16, 13), ("5bit", 16, 16)]
)
def test_preset_bits(name, key_bits, value_bits):
    config = HQMQConfig.preset(name)
    assert config.spec("key", 64, "bfloat16").word_bits == key_bits
    assert config.spec("value", 64, "bfloat16").word_bits == value_bits
    assert (config.center, config.window, config.sink_tokens) == ("block", 64, 4)


def test_paper_preset_is_the_papers_recipe():
    config = HQMQConfig.preset("paper")
    assert config == HQMQConfig.preset("s96_r4")
    assert config.prefill == "stored"
    for role in ("key", "value"):
        spec = config.spec(role, 128, torch.float16, layer=5)
        assert spec == CacheSpec(
            role=role,
            head_dim=128,
            dtype="float16",
            secondary=96,
            radius_bits=4,
            codebook="haar",
            layer=5,
            scale="float16",
            least_squares=False,
            zero_level=True,
            med3x=3.0,
            med3x_scope="batch",
            outliers="16bit",
            outlier_flag="bit",
            pool=0.25,
        )
        assert spec.top_level == 15  # levels 0..15, r = level / 15 x scale


@pytest.mark.parametrize("name", [n for n in HQMQConfig.presets() if n.startswith("s")])
def test_published_sizes(name):
    secondary, radius_bits = (int(part[1:]) for part in name.split("_"))
    spec = HQMQConfig.preset(name).spec("key", 64, "bfloat16")
    assert (spec.secondary, spec.radius_bits) == (secondary, radius_bits)
    # index, radius and Med3x's flag
    assert spec.word_bits == (24 * secondary - 1).bit_length() + radius_bits + 1


def test_preset_takes_changes():
    config = HQMQConfig.preset("3bit", window=128, key={"secondary": 21})
    assert config.window == 128
    assert config.key == CodecConfig(secondary=21)


def test_every_universal_size_is_shipped():
    for size in codebook.UNIVERSAL_SIZES:
        assert codebook.load_universal(CodecConfig(secondary=size).secondary).shape == (size, 4)


# -- window = 0 ----------------------------------------------------------------------------------
def test_quantize_on_write_resolves_what_needs_a_window():
    config = HQMQConfig(window=0)
    assert config.center == "block"  # what the user wrote stays
    assert config.resolved().center == "first"
    assert config.resolved().med3x.outliers == "16bit"
    spec = config.spec("key", 64, "bfloat16")
    assert (spec.center, spec.outliers, spec.window) == ("first", "16bit", 0)
    assert HQMQConfig(window=0, center="none").spec("key", 64, "bfloat16").center == "none"
    assert HQMQConfig().resolved() is not None
    assert config.resolved().resolved() == config.resolved()


# -- layers --------------------------------------------------------------------------------------
def test_layers_are_excepted_or_changed():
    config = HQMQConfig(
        layers={
            0: {"key": {"secondary": 341}, "window": 128},
            1: {"med3x": None},
            2: None,
            3: {"med3x": {"multiplier": 5.0}, "value": CodecConfig(secondary=21)},
        }
    )

    def spec(role, layer):
        return config.spec(role, 64, "bfloat16", layer)

    assert (spec("key", 0).secondary, spec("key", 0).radius_bits) == (341, 4)
    assert spec("key", 0).window == spec("value", 0).window == 128
    assert spec("value", 0).secondary == 42
    assert spec("key", 1).med3x == 0.0
    assert spec("key", 2) is None
    assert spec("value", 2) is None
    assert (spec("key", 3).med3x, spec("key", 3).pool) == (5.0, 0.125)
    assert (spec("value", 3).secondary, spec("value", 3).radius_bits) == (21, 4)
    assert spec("key", 4) == HQMQConfig().spec("key", 64, "bfloat16")


def test_layers_share_a_spec_unless_codebooks_are_random():
    universal, haar = HQMQConfig(), HQMQConfig.preset("paper")
    assert str(universal.spec("key", 64, "bfloat16", 1)) == str(
        universal.spec("key", 64, "bfloat16", 7)
    )
    assert haar.spec("key", 64, "bfloat16", 1) != haar.spec("key", 64, "bfloat16", 7)


def test_layer_can_bring_med3x_back():
    config = HQMQConfig(med3x=None, layers={1: {"med3x": {"roles": ["key", "value"]}}})
    assert config.spec("value", 64, "bfloat16", 0).med3x == 0.0
    assert config.spec("value", 64, "bfloat16", 1).med3x == 3.0


# -- round trips ---------------------------------------------------------------------------------
CONFIGS = {
    **{name: HQMQConfig.preset(name) for name in HQMQConfig.presets()},
    "no med3x": HQMQConfig(med3x=None, kernel="triton"),
    "gluon": HQMQConfig(kernel=KernelPreference.GLUON, rotate=True, center="first"),
    "both roles": HQMQConfig(med3x=Med3xConfig(roles="value", flag="bit", multiplier=4)),
    "layers": HQMQConfig(
        layers={11: None, 2: {"key": {"secondary": 341}, "med3x": None, "window": 0}}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trips(name):
    config = CONFIGS[name]
    for again in (
        HQMQConfig.from_json(config.to_json()),
        HQMQConfig.from_json(config.to_json(indent=2)),
        HQMQConfig.from_dict(config.to_dict()),
        HQMQConfig.from_dict(dataclasses.asdict(config)),
        HQMQConfig.from_options({"config": config.to_json()}),
        HQMQConfig.from_options({"config": config.to_dict()}),
        HQMQConfig.from_options({"config": config}),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        dataclasses.replace(config),
    ):
        assert again == config
        assert hash(again) == hash(config)
        assert again.kernel is config.kernel
        assert again.spec("key", 64, "bfloat16", 2) == config.spec("key", 64, "bfloat16", 2)


def test_plain_dict_is_enough():
    config = HQMQConfig.from_dict({"value": {"secondary": 21}, "kernel": "torch", "med3x": None})
    assert config == HQMQConfig(
        value=CodecConfig(secondary=21), kernel=KernelPreference.TORCH, med3x=None
    )


def test_json_is_plain_and_ordered():
    data = json.loads(HQMQConfig(layers={"10": None, "9": {}}).to_json())
    assert (data["_type"], data["_version"]) == ("HQMQConfig", 1)
    assert list(data["_data"]["layers"]) == ["9", "10"]
    assert data["_data"]["med3x"]["_data"]["roles"] == ["key"]


def test_version_of_a_stored_config_is_checked():
    data = HQMQConfig().to_dict() | {"_version": 9}
    with pytest.raises(ValueError, match="version is 9"):
        HQMQConfig.from_dict(data)


def test_config_is_frozen_and_its_presets_are_not_shared():
    config = HQMQConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 3
    config.layers[0] = None
    assert HQMQConfig().layers == {}


def test_spec_text_parses_back():
    for config in CONFIGS.values():
        for role in ("key", "value"):
            spec = config.spec(role, 64, torch.float32, layer=1)
            assert CacheSpec.parse(str(spec)) == spec
