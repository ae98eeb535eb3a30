"""What `kvtier bench serving` measures: a model of random weights, pages of random values, and who attends to them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.errors import InvalidRequestError
from kvtier.ops import DecodeTables, FixedDecode, GlobalScales, OpenPages
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, Recipe, RecipeName
from kvtier.pages.views import LayerView
from kvtier.worker import OpenPage, WorkerModel, prepare_model

PAGE_SIZE = 64
_MAX_TOKENS = 1 << 20
_ROPE_THETA = 500_000.0
_WORKSPACE_BYTES = 512 << 20


class ModelShape(NamedTuple):
    """Sizes of a Llama; written in this order with slashes between them."""

    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int

    @staticmethod
    def parse(text: str) -> ModelShape:
        """Raises `InvalidRequestError` unless `text` is seven positive numbers."""
        parts = text.split("/")
        if len(parts) != len(ModelShape._fields) or not all(part.isdecimal() and int(part) for part in parts):
            raise InvalidRequestError(
                f"{text!r} is no geometry; write layers/hidden/query heads/KV heads/head dimension/FFN/vocabulary"
            )
        return ModelShape(*map(int, parts))

    def __str__(self) -> str:
        return "/".join(map(str, self))


class Contender(NamedTuple):
    """A page format with what goes with it, and who attends to pages in it."""

    impl: str
    page_format: PageFormat
    open_page: OpenPage
    has_recipe: bool
    make_decode: Callable[[DecodeTables], FixedDecode]


def contenders() -> list[Contender]:
    """Ours, and FlashInfer's where it is installed.

    Other engines write every token to its page at once, and so do all here but the recipe's.
    """
    ours = [
        Contender("kvtier", PageFormat.NVFP4, OpenPage.OFF, False, FixedDecode),
        Contender("kvtier, recipe and open page", PageFormat.NVFP4, OpenPage.BF16, True, FixedDecode),
    ]
    if find_spec("flashinfer") is None:
        return ours
    return [
        *ours,
        Contender("flashinfer fa2", PageFormat.FP8, OpenPage.OFF, False, FixedDecode),
        Contender("flashinfer xqa", PageFormat.FP8, OpenPage.OFF, False, XqaDecode),
        Contender("flashinfer fa2", PageFormat.BF16, OpenPage.OFF, False, FixedDecode),
    ]


class XqaDecode(FixedDecode):
    """FlashInfer's XQA: its fastest for FP8 pages and many sequences; it rounds queries and weights to FP8 too."""

    def __init__(self, tables: DecodeTables) -> None:
        super().__init__(tables)
        self._scratch = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=tables.lengths.device)

    def attend(
        self,
        query: torch.Tensor,
        view: LayerView,
        scales: GlobalScales,
        softmax_scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        tail: OpenPages | None = None,
    ) -> torch.Tensor:
        """As `FixedDecode`, without window, soft-cap and open pages; a sequence has a token at least."""
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        assert sliding_window is None and logit_softcap is None and tail is None
        page_table, lengths = self._tables[:2]
        out: torch.Tensor = xqa_batch_decode_with_kv_cache(
            query.contiguous(),
            (view.k_data, view.v_data),
            self._scratch,
            page_table,
            lengths,
            page_table.shape[1] * view.k_data.shape[2],
            bmm1_scale=softmax_scale * scales.k,
            bmm2_scale=scales.v,
            kv_layout="HND",
        )
        return out


def make_model(shape: ModelShape, device: torch.device) -> WorkerModel:
    """A Llama of random weights in BF16, made on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_query_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=_MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
    )
    torch.manual_seed(0)
    with device:
        module = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    return prepare_model(module, f"random weights {shape}", "random")


def recipe_of(contender: Contender, shape: ModelShape) -> Recipe:
    """The recipe `balanced` with random factors costs what one of calibrated factors does."""
    if not contender.has_recipe:
        return PLAIN
    factors = np.random.default_rng(0).uniform(0.5, 2, (shape.num_layers, shape.num_kv_heads, shape.head_dim))
    return Recipe(RecipeName.BALANCED, balance=factors.astype(np.float32))


def fill(view: LayerView, page_format: PageFormat, generator: torch.Generator) -> None:
    """Gives one layer of all pages random values between 0 and 2, or codes of either sign."""
    for data, scales in ((view.k_data, view.k_scales), (view.v_data, view.v_scales)):
        match page_format:
            case PageFormat.NVFP4:
                data.random_(0, 256, generator=generator)
                scales.view(torch.uint8).random_(0x28, 0x39, generator=generator)  # 0.25 to 1
            case PageFormat.FP8:
                data.view(torch.uint8).random_(0x00, 0x40, generator=generator)
            case PageFormat.BF16:
                data.view(torch.int16).random_(0x3C00, 0x4000, generator=generator)
