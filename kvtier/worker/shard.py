"""The part of a model that one tensor-parallel rank computes.

Which weights are split, and how, says the plan that transformers has for the architecture; torch splits them and sums
what the ranks compute. Every rank has the same share of the attention heads, and so of every page.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from kvtier.errors import InvalidRequestError
from kvtier.worker.geometry import inspect_model
from kvtier.worker.model import WorkerModel

_STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
}
_WHOLE = frozenset({"embedding_rowwise", "replicated_with_grad_allreduce"})
"""What every rank keeps whole: embeddings are little work, and norms of single heads are the same for all."""


def check_shards(model: WorkerModel, world_size: int) -> None:
    """Raises `InvalidRequestError` when the whole `model` cannot be split among so many ranks."""
    config = model.module.config.get_text_config()
    heads = (config.num_attention_heads, model.geometry.num_kv_heads)
    if any(count % world_size for count in heads):
        raise InvalidRequestError(
            f"{model.name} has {heads[0]} query and {heads[1]} KV heads, which {world_size} ranks cannot share equally"
        )
    _plan_of(model)


def shard_model(model: WorkerModel, device: torch.device) -> WorkerModel:
    """This rank's part of `model`, on `device`; takes the model apart, which has passed `check_shards`.

    All ranks of torch's default process group call it together, each with the whole model, which need not fit on their
    devices; then they compute every batch together.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    for name, style in _plan_of(model).items():
        # Each rank has loaded the same weights: nothing needs to be sent.
        parallelize_module(model.module, mesh, {name: style}, src_data_rank=None)
    torch.nn.Module.to(model.module, device)
    return dataclasses.replace(model, geometry=inspect_model(model.module), rank=rank, world_size=world_size)


def _plan_of(model: WorkerModel) -> dict[str, ParallelStyle]:
    """How modules are split, by the pattern of their names."""
    plan: dict[str, str] = model.module.tp_plan
    if not plan:
        raise InvalidRequestError(f"transformers has no tensor-parallel plan for {type(model.module).__name__}")
    unknown = sorted({style for style in plan.values() if style not in _STYLES and style not in _WHOLE})
    if unknown:
        raise InvalidRequestError(
            f"{type(model.module).__name__} splits modules as {', '.join(unknown)}, which kvtier does not know"
        )
    return {name: _STYLES[style] for name, style in plan.items() if style in _STYLES}
