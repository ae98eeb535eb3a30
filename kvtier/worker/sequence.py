"""A request on its way through a worker: its tokens, its lease and the pages that hold its K and V."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable

import numpy as np

from kvtier.client import Lease, TokensByTier
from kvtier.errors import InvalidRequestError, KvtierError
from kvtier.worker.chunk import Chunk
from kvtier.worker.request import FinishReason, Reply, Request, RequestStatistics
from kvtier.worker.sampling import Sampler


class Sequence:
    """Waiting while it has no lease, running while it has one, finished once it has a reply.

    NOTE: positions below `num_computed` have their K and V in pages or in the open page. Pages up to `num_committed`
    tokens are shared with others: they were matched or are committed, and are never written again.

    Raises `InvalidRequestError` when the prompt holds what is no integer.
    """

    def __init__(self, request: Request, number: int, page_size: int) -> None:
        self.request = request
        self.number = number
        self.tokens = _plain(request.prompt)
        self.num_computed = 0
        self.num_committed = 0
        self.pages: list[int] = []
        self.open_slot = 0
        """Of a running sequence: where the worker keeps its open page."""
        self.sampler = Sampler(request.sampling)
        self.reply: Reply | None = None
        self.refused_since_s: float | None = None
        """When the daemon first gave no lease, of the refusals since it gave one last."""
        self._lease: Lease | None = None
        self._page_size = page_size
        self._submitted_s = time.monotonic()
        self._token_times_s: list[float] = []
        self._found: TokensByTier | None = None
        self._left = TokensByTier()
        self._computed_tokens = 0
        self._restarts = 0

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens of the reply so far."""
        return tuple(self.tokens[len(self.request.prompt) :])

    @property
    def lease(self) -> Lease:
        """The lease of a running sequence."""
        assert self._lease is not None, "a waiting sequence has no lease"
        return self._lease

    @property
    def num_remaining(self) -> int:
        """Tokens whose K and V are still to be computed; 1 while it decodes, at least 1 always."""
        return len(self.tokens) - self.num_computed

    @property
    def num_pages_to_start(self) -> int:
        """Pages for the tokens so far and the next one."""
        return len(self.tokens) // self._page_size + 1

    @property
    def num_missing_pages(self) -> int:
        """Pages that the tokens so far need and the sequence does not have."""
        return -(-len(self.tokens) // self._page_size) - len(self.pages)

    def start(self, lease: Lease, open_slot: int) -> None:
        """Begins to run on the matched and the reserved pages of `lease`, with an empty open page in `open_slot`.

        At least the last token is computed, since its logits are wanted: when the cache has all tokens, it attends to
        the matched pages, and its K and V are not written again.
        """
        self._lease = lease
        self.open_slot = open_slot
        self.refused_since_s = None
        self.pages = [*lease.matched_pages.tolist(), *lease.reserved_pages.tolist()]
        self.num_committed = len(lease.matched_pages) * self._page_size
        self.num_computed = min(self.num_committed, len(self.tokens) - 1)
        if self._found is None:
            self._found, self._left = lease.matched_tokens, lease.left_tokens

    def grow(self) -> None:
        """Reserves the missing pages; raises `CacheFullError` when every page of the pool is held."""
        self.pages += self.lease.extend(self.num_missing_pages).tolist()

    def chunk(self, max_tokens: int) -> Chunk:
        """The next tokens to compute, at most `max_tokens`."""
        start = self.num_computed
        is_shared = start < self.num_committed
        return Chunk(self.tokens[start : start + max_tokens], start, self.pages, self.open_slot, is_shared)

    def advance(self, chunk: Chunk) -> None:
        """Notes that the K and V of `chunk` are in the pages or the open page."""
        self.num_computed = chunk.end
        self._computed_tokens += max(0, min(chunk.end, len(self.request.prompt)) - chunk.start)

    def commit_full_pages(self) -> None:
        """Gives the pages that are full by now to the cache; raises `SessionLostError` when the lease is gone."""
        full_tokens = self.num_computed // self._page_size * self._page_size
        if full_tokens > self.num_committed:
            pages = self.pages[self.num_committed // self._page_size : full_tokens // self._page_size]
            tokens = np.array(self.tokens[self.num_committed : full_tokens], dtype="<u4")
            self.lease.commit(tokens, np.array(pages, dtype="<u4"), self.request.extra_keys)
            self.num_committed = full_tokens

    def append_token(self, token: int) -> FinishReason | None:
        """Takes the next token, which was chosen by its sampler; tells why the reply ends with it, if it does."""
        self.sampler.advance()
        self.tokens.append(token)
        self._token_times_s.append(time.monotonic())
        if token in self.request.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) == self.request.max_new_tokens else None

    def restart(self) -> None:
        """Goes back to waiting, without a lease; what the cache has of the tokens so far will be matched."""
        self._lease = None
        self.pages = []
        self.num_computed = self.num_committed = 0
        self._restarts += 1

    def finish(self, reason: FinishReason, error: KvtierError | None = None) -> None:
        """Ends the request, which needs no lease any more."""
        times_s = self._token_times_s or [self._submitted_s]
        statistics = RequestStatistics(
            prompt_tokens=len(self.request.prompt),
            found=self._found or TokensByTier(),
            left=self._left,
            computed_tokens=self._computed_tokens,
            time_to_first_token_s=times_s[0] - self._submitted_s,
            decode_s=times_s[-1] - times_s[0],
            restarts=self._restarts,
        )
        self.reply = Reply(self.generated, reason, statistics, error)


def _plain(tokens: Iterable[int]) -> list[int]:
    """Integers of Python's own, such as messages to other ranks take; numpy's are integers too."""
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise InvalidRequestError(f"the prompt holds what is no token id: {error}") from error
