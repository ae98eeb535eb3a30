"""What a model says whose K and V were quantised, by plain transformers and numpy, with no code of kvtier's.

A model runs with an attention function of this file's own over one sequence. Formats and recipes are written from their
definitions, with E4M3 and E2M1 enumerated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, PreTrainedModel

Array = NDArray[np.float32]
Values = NDArray[np.float32] | NDArray[np.float64]
Quantise = Callable[[Values], Values]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [code % 8 / 8 * 2.0**-6 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)]
)


class Storage(NamedTuple):
    """How K and V are kept: `quantise` is what pages give back, `balance` is `(layers, Hkv, D)` or None.

    With `open_in_bf16`, tokens go through bfloat16, and those of a page are quantised once it is full. A token sees its
    own page so, unless it fills it. Without, every token is quantised as it comes.
    """

    quantise: Quantise
    open_in_bf16: bool
    page_size: int
    balance: Array | None = None


def quantised_logits(module: PreTrainedModel, tokens: list[int], storage: Storage) -> NDArray[np.float64]:
    """Logits `(tokens, vocabulary)` of a copy of `module`."""

    def attention(layer: torch.nn.Module, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return _attend(storage, layer.layer_idx, tensors[:3], **options), None

    AttentionInterface.register("simulated", attention)
    return _logits(module, tokens, "simulated")


def plain_logits(module: PreTrainedModel, tokens: list[int]) -> NDArray[np.float64]:
    """The same with transformers' own attention."""
    return _logits(module, tokens, "eager")


def kullback_leibler(exact: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """By row, in nats, of two arrays of logits."""
    log_p, log_q = _log_softmax(exact), _log_softmax(other)
    result: NDArray[np.float64] = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    return result


def losses(logits: NDArray[np.float64], following: list[int]) -> NDArray[np.float64]:
    """Negative log-likelihoods of the tokens that follow."""
    result: NDArray[np.float64] = -_log_softmax(logits)[range(len(following)), following]
    return result


def bf16(values: Values) -> Values:
    return torch.from_numpy(values).to(torch.bfloat16).to(torch.float64).numpy().astype(values.dtype)


def fp8(values: Values) -> Values:
    return (np.sign(values) * E4M3[_nearest(E4M3, np.abs(values))]).astype(values.dtype)


def nvfp4(values: Values) -> Values:
    """The largest magnitude of 16 values becomes 6."""
    blocks = values.astype(np.float32).reshape(-1, 16)
    return _at_scales(blocks, _largest_scales(blocks)).reshape(values.shape)


def nvfp4_searched(values: Values) -> Values:
    """Of the codes 0, -1, 1, 4 and 5 from that scale's, the first of the least squared error, if all of them exist."""
    blocks = values.astype(np.float32).reshape(-1, 16)
    plain = _largest_scales(blocks)
    searched = (plain >= 4) & (plain <= 121)
    candidates = np.stack([plain + offset * searched for offset in (0, -1, 1, 4, 5)])
    errors = np.stack([_squared_errors(blocks, plain, candidate) for candidate in candidates])
    best = candidates[errors.argmin(0), range(len(blocks))]
    return _at_scales(blocks, best).reshape(values.shape)


def _logits(module: PreTrainedModel, tokens: list[int], implementation: str) -> NDArray[np.float64]:
    own = copy.deepcopy(module)
    own.set_attn_implementation(implementation)
    with torch.inference_mode():
        logits = own(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.double().numpy()


def _attend(
    storage: Storage,
    layer: int,
    tensors: tuple[torch.Tensor, ...],
    *,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> torch.Tensor:
    query, key, value = (tensor[0].numpy() for tensor in tensors)
    group, count = len(query) // len(key), query.shape[1]
    if storage.balance is not None:
        factors = storage.balance[layer][:, None]
        unit = np.float32(key.shape[-1] ** -0.5)
        key = _walsh_hadamard(key, unit / factors)
        query = _walsh_hadamard(query, (unit * factors).repeat(group, 0))
    held = (bf16(key), bf16(value)) if storage.open_in_bf16 else (key, value)
    paged_key, paged_value = (storage.quantise(part).repeat(group, 0) for part in held)
    held_key, held_value = (part.repeat(group, 0) for part in held)

    position = np.arange(count)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (sliding_window or count))
    num_paged = (position + 1) // storage.page_size * storage.page_size if storage.open_in_bf16 else position + 1
    paged = position < num_paged[:, None]
    logits = np.where(paged, query @ paged_key.swapaxes(1, 2), query @ held_key.swapaxes(1, 2)) * scaling
    weights = np.exp(_log_softmax(np.where(seen, logits.astype(np.float64), -np.inf)))
    out = (weights * paged) @ paged_value + (weights * ~paged) @ held_value
    return torch.from_numpy(out).to(tensors[0].dtype).transpose(0, 1).unsqueeze(0)


def _walsh_hadamard(values: Values, factors: Array) -> Values:
    """The transform of `values * factors` over the last dimension, in fp32: first neighbours, last both halves."""
    rows = values.astype(np.float32) * factors
    width = 1
    while width < rows.shape[-1]:
        pairs = rows.reshape(-1, 2, width)
        rows = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1).reshape(values.shape)
        width *= 2
    return rows.astype(values.dtype)


def _largest_scales(blocks: Array) -> NDArray[np.int64]:
    return _nearest(E4M3, np.abs(blocks).max(-1) / np.float32(6))


def _at_scales(blocks: Array, codes: NDArray[np.int64]) -> Array:
    steps = E4M3[codes].astype(np.float32)[:, None]
    reciprocals = np.divide(1, steps, out=np.zeros_like(steps), where=steps > 0)
    return (np.sign(blocks) * E2M1[_nearest(E2M1, np.abs(blocks * reciprocals))] * steps).astype(np.float32)


def _squared_errors(blocks: Array, plain: NDArray[np.int64], candidate: NDArray[np.int64]) -> Array:
    """In fp16, with halves rounded up, in units of the plain step; even and odd elements are summed apart.

    Of equal errors in real numbers, fp16 decides which is less, so that nothing but fp16 finds the same scales.
    """
    step, other = (np.where(codes > 0, E4M3[codes], 1).astype(np.float32)[:, None] for codes in (plain, candidate))
    magnitudes = np.abs(blocks * (1 / step)).astype(np.float16)
    shrink = (step * (1 / other) * np.float32(2**-7)).astype(np.float16)
    grow = (other * (1 / step)).astype(np.float16)
    scaled = (magnitudes * np.float16(2**-7) * shrink).astype(np.float64) * 2**14
    rounded = E2M1[np.searchsorted((E2M1[1:] + E2M1[:-1]) / 2, scaled, side="right")]
    errors = (magnitudes.astype(np.float64) - rounded * grow.astype(np.float64)).astype(np.float16)
    sums = np.zeros((len(blocks), 2), dtype=np.float16)
    for pair in errors.reshape(-1, 8, 2).swapaxes(0, 1):
        sums = (sums.astype(np.float64) + pair.astype(np.float64) ** 2).astype(np.float16)
    return sums.astype(np.float32).sum(-1)


def _nearest(grid: NDArray[np.float64], values: NDArray[Any]) -> NDArray[np.int64]:
    """Indices of the nearest entries of an ascending grid, the even one at a tie, the last one beyond the end."""
    exact = values.astype(np.float64)
    above = np.searchsorted(grid, exact).clip(1, len(grid) - 1)
    to_below, to_above = exact - grid[above - 1], grid[above] - exact
    takes_below = (to_below < to_above) | ((to_below == to_above) & (above % 2 == 1))
    return above - takes_below


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
