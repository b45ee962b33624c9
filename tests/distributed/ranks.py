"""What every rank runs: `torchrun -m tests.distributed.ranks FOLDER CASE...`.

Each case returns facts of this rank; rank 0 writes those of all ranks to `FOLDER/CASE.json`.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import hqmq_compile.backend
from hqmq_compile import HQMQConfig
from hqmq_compile.backend import hqmq
from hqmq_compile.cache.store import PackedKV
from tests.configs import CONFIGS
from tests.distributed.attention import Attention

INDUCTOR = hqmq_compile.backend.compile_fx
HEADS = "layers.*.self_attn."
SINKS = {  # transformers leaves the attention of gpt-oss whole; this plan divides its heads
    f"model.{HEADS}{name}": style
    for name, style in {
        "q_proj": "colwise",
        "k_proj": "colwise",
        "v_proj": "colwise",
        "o_proj": "rowwise",
        "sinks": "colwise",
    }.items()
} | {"model.layers.*.self_attn": "local_params"}


def only_rewritten(gm, inputs, config_patches=None):
    """In place of inductor, which takes most of the time."""
    return gm.forward


def compiled(function, config: HQMQConfig):
    return torch.compile(function, backend=hqmq, options={"config": config})


def differences(mine: list[PackedKV], whole: list[PackedKV], first: int) -> dict:
    """How the packed bits of these heads differ from those of the whole model, by layer and role."""
    found = {"bytes": [], "different": [], "packed_slots": [], "first_head": []}
    for a, b in zip(mine, whole, strict=True):
        heads = a.shape[1]
        pairs = [
            (getattr(a.buffers, name), getattr(b.buffers, name)[:, first : first + heads])
            for name in ("codes", "scales", "pool", "exponents", "means")
        ]
        found["bytes"].append(sum(x.nbytes for x, _ in pairs))
        found["different"].append(sum(int((x != y).sum()) for x, y in pairs))
        found["packed_slots"].append(a.packed_slots)
        found["first_head"].append(a.spec.first_head)
        again = PackedKV.from_state_dict(a.state_dict())
        assert torch.equal(again.dequantize(), a.dequantize())
    return found


# -- models of transformers ------------------------------------------------------------------------
def generates(
    folder: Path, name: str, kind: str, config: HQMQConfig, plan="auto", **settings
) -> dict:
    """Greedy text of a tensor-parallel model and of the whole one, both compiled, packed caches."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from tests.models.tiny import prompt, tiny

    whole = tiny(name, **settings)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / name)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder / name,
        distributed_config=DistributedConfig(tp_plan=plan),
        attn_implementation=whole.config._attn_implementation,
        dtype=torch.float32,
    ).eval()
    torch._dynamo.reset()  # the recompile limit counts all models together
    outs = []
    for each in (model, whole):
        each.forward = compiled(each.forward, config)
        outs.append(
            each.generate(
                prompt(40),
                max_new_tokens=20,
                min_new_tokens=20,
                do_sample=False,
                cache_implementation=kind,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    logits, expected = (torch.cat(out.logits) for out in outs)
    stores = [
        [t.packed for layer in out.past_key_values.layers for t in (layer.keys, layer.values)]
        for out in outs
    ]
    heads = stores[0][0].shape[1]
    return differences(*stores, dist.get_rank() * heads) | {
        "tokens": outs[0].sequences.tolist(),
        "error": float((logits - expected).norm() / expected.norm()),
        "heads": heads,
    }


def llama(folder: Path) -> dict:
    hqmq_compile.backend.compile_fx = INDUCTOR
    return generates(folder, "llama", "static", CONFIGS["haar"], num_hidden_layers=1)


def qwen(folder: Path) -> dict:
    hqmq_compile.backend.compile_fx = only_rewritten
    return generates(folder, "qwen2", "dynamic", CONFIGS["16"], num_hidden_layers=1)


def sinks(folder: Path) -> dict:
    hqmq_compile.backend.compile_fx = only_rewritten
    return generates(folder, "gpt-oss", "static", CONFIGS["haar"], SINKS)


# -- plain PyTorch ---------------------------------------------------------------------------------
def attends(kv_heads: int, mesh, first: int, sessions: int) -> list[dict]:
    """Sessions of one attention: the second one comes from inductor's cache on disk."""
    torch._dynamo.reset()
    config = CONFIGS["haar"]
    whole = Attention(kv_heads)
    expected = whole.session(compiled(whole.forward, config))
    facts = []
    for _ in range(sessions):
        torch._dynamo.reset()
        counters.clear()
        model = Attention(kv_heads, mesh)
        actual = model.session(compiled(model.forward, config))
        stores = [[m.keys.packed, m.values.packed] for m in (model, whole)]
        facts.append(
            differences(*stores, first)
            | {
                "error": float((actual - expected).norm() / expected.norm()),
                "hits": counters["inductor"]["fxgraph_cache_hit"],
            }
        )
    return facts


def divided(folder: Path) -> list[dict]:
    """Four KV heads over all ranks."""
    hqmq_compile.backend.compile_fx = INDUCTOR
    world, rank = dist.get_world_size(), dist.get_rank()
    return attends(4, dist.init_device_mesh("cpu", (world,)), rank * 4 // world, 2)


def copied(folder: Path) -> list[dict]:
    """Two KV heads over four ranks: each on two of them."""
    hqmq_compile.backend.compile_fx = only_rewritten
    return attends(2, dist.init_device_mesh("cpu", (2, 2)), dist.get_rank() // 2, 1)


# -- failures --------------------------------------------------------------------------------------
def fails(how: str) -> dict:
    """Rank 1 stops after the first call; rank 0 goes on, in a group that waits five seconds."""
    hqmq_compile.backend.compile_fx = only_rewritten
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    dist.group.WORLD = group
    model = Attention(4, dist.DeviceMesh.from_group(group, "cpu"))
    forward = compiled(model.forward, CONFIGS["16"])
    model.session(forward, (1, 1))
    print("both ranks are at work", flush=True)
    if dist.get_rank() == 1:
        if how == "raise":
            raise RuntimeError("rank 1 gives up")
        time.sleep(60)
    model.session(forward, (1, 1))
    return {}


def raises(folder: Path) -> dict:
    return fails("raise")


def hangs(folder: Path) -> dict:
    return fails("hang")


def main(folder: str, *cases: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    for case in cases:
        facts = [None] * dist.get_world_size()
        dist.all_gather_object(facts, globals()[case](Path(folder)))
        if dist.get_rank() == 0:
            (Path(folder) / f"{case}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
