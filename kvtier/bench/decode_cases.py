"""What `kvtier bench decode` measures: its cases, their tensors, and the exact result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvtier import ops
from kvtier.bench.gpu import ROTATED_BYTES
from kvtier.errors import InvalidRequestError
from kvtier.ops.reference import transform as reference_transform
from kvtier.ops.reference.gather import read_tokens
from kvtier.ops.reference.transform import Balance, Matrices, Transform
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.recipe import RecipeName
from kvtier.pages.views import LayerView, layer_view

UNIT_SCALES = ops.GlobalScales()
_SCALE_BYTES = (0x28, 0x38)  # block scales of 0.25 to 1


class Geometry(NamedTuple):
    """Query heads, KV heads and head dimension; written "64/8/128"."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def parse(text: str) -> Geometry:
        """Raises `InvalidRequestError` unless `text` is three numbers that make a geometry."""
        parts = text.split("/")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise InvalidRequestError(f"{text!r} is no geometry; write query heads/KV heads/head dimension: 64/8/128")
        return Geometry(*map(int, parts))

    def __str__(self) -> str:
        return "/".join(map(str, self))


class Load(NamedTuple):
    """Sequences and tokens of each; written "64x8192"."""

    batch: int
    context: int

    @staticmethod
    def parse(text: str) -> Load:
        """Raises `InvalidRequestError` unless `text` is two positive numbers."""
        parts = text.split("x")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
            raise InvalidRequestError(f"{text!r} is no load; write sequences x tokens: 64x8192")
        return Load(*map(int, parts))


class Case(NamedTuple):
    """One thing to measure."""

    geometry: Geometry
    load: Load
    page_size: int

    @property
    def pages_a_sequence(self) -> int:
        return -(-self.load.context // self.page_size)

    def layout(self, page_format: PageFormat, num_layers: int) -> PageLayout:
        return PageLayout(page_format, num_layers, self.geometry.num_kv_heads, self.geometry.head_dim, self.page_size)

    def cache_bytes(self, page_format: PageFormat) -> int:
        """Bytes of K and V, codes and scales, that one step must read."""
        return self.load.batch * self.load.context * self.layout(page_format, 1).token_bytes


class Inputs(NamedTuple):
    """Tensors of a case: pages of several layers in random order, all sequences at full length."""

    case: Case
    query: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    views: list[LayerView]
    tail: ops.OpenPages  # the last half page of every sequence, for contenders with a recipe
    transforms: dict[RecipeName, Transform]  # of their queries

    @property
    def lengths_before_tail(self) -> torch.Tensor:
        """Tokens in pages for contenders with a recipe."""
        return self.lengths - self.tail.lengths

    @property
    def softmax_scale(self) -> float:
        return float(self.case.geometry.head_dim**-0.5)


Decoder = Callable[[LayerView], torch.Tensor]  # attends to one layer and returns the output


class Contender(NamedTuple):
    """An implementation for one format.

    `dense`: it gets K and V as tensors of their own, not as views of a pool.
    `recipe`: how it transforms the queries; the last half page is open then.
    """

    impl: str
    page_format: PageFormat
    prepare: Callable[[Inputs], Decoder]
    dense: bool = False
    recipe: RecipeName | None = None


def make_inputs(case: Case, page_format: PageFormat, device: torch.device) -> Inputs:
    """Random pages of as many layers as make up the bytes that replays take turns over."""
    generator = torch.Generator(device).manual_seed(0)
    num_layers = max(2, math.ceil(ROTATED_BYTES / case.cache_bytes(page_format)))
    layout = case.layout(page_format, num_layers)
    num_pages = case.load.batch * case.pages_a_sequence
    pool = torch.empty(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
    views = [layer_view(pool, layout, layer) for layer in range(num_layers)]
    for view in views:
        for data, scales in ((view.k_data, view.k_scales), (view.v_data, view.v_scales)):
            if page_format is PageFormat.NVFP4:
                data.random_(0, 256, generator=generator)
                low, high = _SCALE_BYTES
                scales.view(torch.uint8).random_(low, high + 1, generator=generator)
            else:
                values = torch.randn(data.shape, dtype=torch.bfloat16, device=device, generator=generator)
                data.copy_(values)
    order = torch.randperm(num_pages, device=device, generator=generator)
    lengths = torch.full((case.load.batch,), case.load.context, dtype=torch.int32, device=device)
    num_query_heads, num_kv_heads, head_dim = case.geometry

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    tail_shape = (case.load.batch, case.page_size, num_kv_heads, head_dim)
    tail = ops.OpenPages(random(*tail_shape), random(*tail_shape), torch.full_like(lengths, case.page_size // 2))
    balance = Balance.of(torch.rand(num_kv_heads, head_dim, device=device, generator=generator) + 0.5)
    matrix = random_basis(num_kv_heads, head_dim, generator)
    transforms: dict[RecipeName, Transform] = {RecipeName.BALANCED: balance, RecipeName.FULL: Matrices(matrix, matrix)}
    query = random(case.load.batch, num_query_heads, head_dim)
    return Inputs(case, query, order.int().view(case.load.batch, -1), lengths, views, tail, transforms)


def random_basis(num_kv_heads: int, head_dim: int, generator: torch.Generator) -> torch.Tensor:
    """Orthogonal matrices of random directions, `(Hkv, D, D)` fp16: a transform that costs what any other does."""
    shape = (num_kv_heads, head_dim, head_dim)
    basis: torch.Tensor = torch.linalg.qr(torch.randn(shape, device=generator.device, generator=generator))[0]
    return basis.half().contiguous()


def checked_sequences(case: Case) -> list[int]:
    """The sequences whose output is compared with the exact one."""
    return sorted({0, case.load.batch - 1})


def exact_output(inputs: Inputs, recipe: RecipeName | None) -> torch.Tensor:
    """Attention in fp64 of the checked sequences, `(sequences, Hq, D)`, with the recipe's parts or without.

    Transformed queries are the reference's, rounded to their dtype.
    """
    query = inputs.query if recipe is None else _transformed(inputs.query, inputs.transforms[recipe])
    outputs: list[torch.Tensor] = []
    for index in checked_sequences(inputs.case):
        pages = inputs.page_table[index]
        context = int((inputs.lengths if recipe is None else inputs.lengths_before_tail)[index])
        tokens = read_tokens(inputs.views[0], pages, 0, context, UNIT_SCALES, torch.float32)
        keys, values = tokens
        if recipe is not None:
            open_tokens = slice(int(inputs.tail.lengths[index]))
            keys = torch.cat((keys, inputs.tail.key[index, open_tokens].float()))
            values = torch.cat((values, inputs.tail.value[index, open_tokens].float()))
        keys, values = keys.double().transpose(0, 1), values.double().transpose(0, 1)
        grouped = torch.unflatten(query[index].double(), 0, (len(keys), -1))
        weights = (grouped @ keys.transpose(1, 2) * inputs.softmax_scale).softmax(-1)
        outputs.append((weights @ values).flatten(0, 1))
    return torch.stack(outputs)


def _transformed(query: torch.Tensor, transform: Transform) -> torch.Tensor:
    match transform:
        case Matrices():
            return reference_transform.multiplied(query, transform.query)
        case Balance():
            return reference_transform.balanced(query, transform.query)
