"""Attention of a worker's batches beside plain attention on what every token should see, layer by layer.

Both get the same queries, keys and values, so that nothing but the order of sums differs between them: over a whole
model that would now and then round a value to the neighbouring code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from scratch_pool import ScratchPool, pages_for
from tiny_models import PAGE_SIZE

from kvtier.ops import round_trip, transform_keys, transform_queries
from kvtier.worker.attention import LayerCall
from kvtier.worker.chunk import Chunk
from kvtier.worker.options import OpenPage, PrefillAttends

OPEN_DTYPES = {OpenPage.BF16: torch.bfloat16, OpenPage.FP8: torch.float8_e4m3fn, OpenPage.OFF: torch.float32}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Lockstep:
    """An attention batch that computes one sequence in chunks and checks the attention of every layer.

    Attributes:
        logits: `(tokens, vocabulary)`.
        held: by layer, K and V as the open page gives them back, `(2, tokens, Hkv, D)`.
    """

    def __init__(self, pool: ScratchPool, tokens: list[int], cuts: Sequence[int], pages: Sequence[int] = ()) -> None:
        """The sequence is cut into chunks at `cuts`, the first of which is 0."""
        self._pool = pool
        self._tokens: list[list[torch.Tensor]] = [[] for _ in pool.pages.recipes]
        pages = pages or pages_for(len(tokens))
        chunks = [Chunk(tokens[start:end], start, pages, 3) for start, end in pairwise(cuts)]
        self.logits = torch.cat([self._compute(chunk) for chunk in chunks])

    @property
    def held(self) -> list[torch.Tensor]:
        return [self._rounded(torch.cat(layer, dim=1)) for layer in self._tokens]

    def attend(self, call: LayerCall) -> torch.Tensor:
        attended = self._batch.attend(call)
        transform = self._pool.pages.recipes[call.layer].transform
        if transform:
            key, query = transform_keys(call.key, transform), transform_queries(call.query, transform)
            call = call._replace(key=key, query=query)
        self._tokens[call.layer].append(torch.stack((call.key, call.value)))
        torch.testing.assert_close(attended, self._plain_attention(call), **CLOSE)
        return attended

    def _compute(self, chunk: Chunk) -> torch.Tensor:
        self._chunk, self._batch = chunk, self._pool.batch(chunk)
        rows = self._batch.input_ids, self._batch.position_ids
        with torch.inference_mode():
            output = self._pool.model.module(*rows[:1], position_ids=rows[1], use_cache=False, kvtier_batch=self)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _plain_attention(self, call: LayerCall) -> torch.Tensor:
        """The token at position p sees the first `(p + 1) // PAGE_SIZE * PAGE_SIZE` tokens as pages give them back, and
        those behind as the open page does; a fresh prefill sees its own tokens as they are, whatever page they fill.
        """
        recipe, start = self._pool.pages.recipes[call.layer], self._chunk.start
        group = call.query.shape[1] // call.key.shape[1]
        exact = torch.cat(self._tokens[call.layer], dim=1)
        held = self._rounded(exact)
        given_back = round_trip(held, self._pool.page_format, 1.0, recipe.block_scales)
        position, key_position = torch.arange(start, self._chunk.end).unsqueeze(1), torch.arange(self._chunk.end)
        page_size = 1 if self._pool.open_page is OpenPage.OFF else PAGE_SIZE
        is_fresh = self._pool.attends is PrefillAttends.FRESH and not self._chunk.is_decode
        is_paged = key_position < (start if is_fresh else position + 1) // page_size * page_size
        is_exact = (key_position >= start) & is_fresh
        kinds = ((given_back, is_paged), (held, ~is_paged & ~is_exact), (exact, is_exact))
        distance = position - key_position
        is_seen = (distance >= 0) & (distance < (call.sliding_window or len(key_position)))

        def heads(tokens: torch.Tensor) -> torch.Tensor:
            return tokens.transpose(0, 1).repeat_interleave(group, dim=0)

        query = call.query.transpose(0, 1)
        logits = sum(torch.where(of_kind, query @ heads(tokens[0]).mT, 0) for tokens, of_kind in kinds)
        logits = logits * call.softmax_scale
        if call.logit_softcap:
            logits = call.logit_softcap * torch.tanh(logits / call.logit_softcap)
        weights = logits.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        return sum((weights * of_kind) @ heads(tokens[1]) for tokens, of_kind in kinds).transpose(0, 1)

    def _rounded(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.to(OPEN_DTYPES[self._pool.open_page]).float()
