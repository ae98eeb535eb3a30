"""The real half of the modelled worker: its calls to the daemon."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.client import AsyncLease, AsyncSession
from kvtier.errors import CacheFullError
from kvtier.replay.endless import EndlessCache
from kvtier.replay.trace import Request

# Real time, as a safeguard: how long promotions take is modelled, so that they are waited for to their end.
_PROMOTION_WAIT_S = 60.0


class Grant(NamedTuple):
    """A lease for a request, with pages for all of its prompt and its reply.

    `prefixes` are hashes of the prompt's whole pages for the `endless` cache, which would have found `findable_tokens`.
    """

    request: Request
    lease: AsyncLease
    endless: EndlessCache
    prefixes: list[int]
    findable_tokens: int


class ReplayWorker:
    """Gets leases for requests, commits their prompts, and gives the leases back."""

    def __init__(self, session: AsyncSession, namespace: str) -> None:
        self._session = session
        self._namespace = namespace
        self._page_size = session.identity.layout.page_size
        self._num_leases = 0

    async def lease(self, request: Request, endless: EndlessCache) -> Grant | None:
        """What is cached of a prompt, and pages for the rest and for the reply.

        None when other requests hold too many pages, so that it is worth asking again when one of them has ended.
        Raises `CacheFullError` when it is not.
        """
        num_pages = -(-(request.prompt.size + request.output_tokens) // self._page_size)
        if num_pages > self._session.pool.num_pages:
            raise CacheFullError(f"{num_pages} pages asked of {self._session.pool.num_pages}")
        # The last token is computed even if its page is cached: the reply begins with what the model makes of it.
        known = request.prompt[:-1]
        # NOTE: The daemon is told no prefill rate, which it would weigh against the speed of shrunk pages here. By the
        # modelled rates promotion is always the faster way: `Rates.check_promotion`.
        tokens = known.astype("<u4").tobytes()
        lease = await self._session.acquire(self._namespace, tokens, wait_s=_PROMOTION_WAIT_S)
        try:
            await lease.extend(num_pages - lease.matched_pages.size)
        except CacheFullError:
            await lease.release()
            if self._num_leases == 0:
                raise
            return None
        self._num_leases += 1
        prefixes = endless.prefixes(request.prompt)
        return Grant(request, lease, endless, prefixes, endless.find(prefixes[: known.size // self._page_size]))

    async def commit(self, grant: Grant) -> None:
        """Publishes the whole pages of a prompt that were computed. Their bytes are left as they are."""
        prompt, lease = grant.request.prompt, grant.lease
        first, end = lease.matched_pages.size, prompt.size // self._page_size
        if end > first:
            tokens = prompt[first * self._page_size : end * self._page_size].astype("<u4").tobytes()
            await lease.commit(tokens, lease.reserved_pages[: end - first])
        grant.endless.add(grant.prefixes)

    async def release(self, grant: Grant) -> None:
        """Ends a lease."""
        await grant.lease.release()
        self._num_leases -= 1
