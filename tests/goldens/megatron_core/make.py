"""Ask real megatron-core 0.16.1 for what it decides by arithmetic, and keep its answers: python tests/goldens/megatron_core/make.py

Writes flat_buffers.json, pipeline.json and ranks.json beside this file. Needs megatron-core; the tests do not.
"""

import itertools
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
torch.cuda.current_device = lambda: "cpu"

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import param_and_grad_buffer  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer  # noqa: E402
from megatron.core.parallel_state import RankGenerator  # noqa: E402
from megatron.core.transformer.enums import LayerType  # noqa: E402
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402

param_and_grad_buffer.log_on_each_pipeline_stage = lambda *args, **kwargs: None  # wants a process group
HERE = Path(__file__).parent
CHOOSE = random.Random(20250101)


class Group:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size

    def rank(self):
        return 0


def flat_buffer(numels, shared, dp, bucket_size, busbw):
    params = [torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in numels]
    for param, is_shared in zip(params, shared, strict=True):
        param.shared_embedding = is_shared
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=busbw)
    groups = SimpleNamespace(tp=Group(1), dp_cp=Group(dp))
    buffer = _ParamAndGradBuffer(
        config, torch.bfloat16, torch.float32, params, Group(dp), bucket_size, {p: "" for p in params}, 1.0,
        list(range(len(params))), False, groups,
    )  # fmt: skip
    return {
        "numels": numels, "shared": shared, "data_parallel": dp, "bucket_size": bucket_size, "busbw": busbw,
        "index_map": [buffer.param_index_map[p] for p in params],
        "numel": buffer.numel, "numel_unpadded": buffer.numel_unpadded,
        "buckets_unpadded": [bucket.numel_unpadded for bucket in buffer.buckets],
    }  # fmt: skip


def flat_buffers():
    cases = []
    for _ in range(150):
        count = CHOOSE.randint(1, 9)
        numels = [CHOOSE.choice([1, 63, 64, 65, 100, 128, 192, 1000, CHOOSE.randint(1, 3000)]) for _ in range(count)]
        shared = [False] * count
        if CHOOSE.random() < 0.4:
            shared[CHOOSE.choice([0, count - 1, CHOOSE.randrange(count)])] = True
        bucket = CHOOSE.choice([None, None, 1, 64, 500, 2000, 10_000])
        cases.append(flat_buffer(numels, shared, CHOOSE.choice([1, 2, 3, 6, 8, 96]), bucket, CHOOSE.random() < 0.15))
    return cases


def layers(num_layers, pp, vpp, **options):
    config = SimpleNamespace(
        num_layers=num_layers, pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=options.get("first"), num_layers_in_last_pipeline_stage=options.get("last"),
        account_for_embedding_in_pipeline_split=options.get("embedding", False),
        account_for_loss_in_pipeline_split=options.get("loss", False),
    )  # fmt: skip
    try:
        counts = [get_num_layers_to_build(config, v if vpp > 1 else None, p) for v in range(vpp) for p in range(pp)]
    except AssertionError:
        counts = None
    if counts is not None and (sum(counts) != num_layers or min(counts) < 0):
        counts = None  # Megatron would build another model than it was asked for
    return {"num_layers": num_layers, "pp": pp, "vpp": vpp, **options, "counts": counts}


def layout_string(text, pp, vpp):
    with mock.patch.object(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: vpp):
        layout = PipelineParallelLayerLayout(text, pp)
        places = list(itertools.product(range(vpp), range(pp)))
        count = {
            kind: [layout.get_num_layers_to_build(getattr(LayerType, kind), v, p) for v, p in places]
            for kind in ("embedding", "decoder", "mtp", "loss")
        }
        offsets = [layout.get_layer_offset(LayerType.decoder, v, p) for v, p in places]
    return {"layout": text, "pp": pp, "vpp": vpp, **count, "offsets": offsets}


STRINGS = [
    ("Et|tttL", 2, 1), ("Ettt|(tt|)*2tL", 4, 1), ("E|tt|tt|L", 4, 1), ("Et*3|t*2,t|t,tL", 3, 1), ("E|(t|)*6L", 4, 2),
    ("Et|(tt|)*5,tmL", 7, 1), ("Ett|tt|m|L", 2, 2), ("Ett||tt|L", 2, 2), ("Ettt|(tt|)*29,m|L", 8, 4), ("E(t|t)*3L", 2, 2),
    ("Et|||||||tL", 4, 2),
]  # fmt: skip


def pipeline():
    rules = []
    for n, pp, vpp in itertools.product((1, 2, 4, 6, 7, 8, 12), (1, 2, 3, 4), (1, 2, 3)):
        if pp == 1 and vpp > 1:
            continue
        rules.append(layers(n, pp, vpp))
        rules += [layers(n, pp, vpp, embedding=e, loss=f) for e, f in ((True, False), (False, True), (True, True))]
        if pp > 1:
            choices = [c for c in itertools.product((None, 1, 2, 3), (None, 1, 2, 4)) if c != (None, None)]
            rules += [layers(n, pp, vpp, first=first, last=last) for first, last in choices]
    return {"rules": rules, "strings": [layout_string(*case) for case in STRINGS]}


def ranks():
    cases = []
    for tp, pp, cp, dp, ep, etp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 4), (1, 2)):
        stage = tp * cp * dp
        if stage % (ep * etp) or stage * pp > 24:
            continue
        dense = RankGenerator(tp, 1, dp, pp, cp, "tp-cp-ep-dp-pp")
        expert = RankGenerator(etp, ep, stage // (ep * etp), pp, 1, "tp-cp-ep-dp-pp")

        def places(generator, token, world=stage * pp):
            found = {rank: i for group in generator.get_ranks(token) for i, rank in enumerate(group)}
            return [found[rank] for rank in range(world)]

        cases.append(
            {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "etp": etp}
            | {f"{axis}_rank": places(dense, axis) for axis in ("tp", "pp", "cp", "dp")}
            | {"ep_rank": places(expert, "ep"), "etp_rank": places(expert, "tp"), "expert_dp_rank": places(expert, "dp")}
        )
    return CHOOSE.sample(cases, 60)


def write(name, data):
    items = data.items() if isinstance(data, dict) else [("cases", data)]
    text = ",\n".join(f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for key, rows in items)
    (HERE / name).write_text("{\n" + text + "\n}\n")


write("flat_buffers.json", flat_buffers())
write("pipeline.json", pipeline())
write("ranks.json", ranks())
