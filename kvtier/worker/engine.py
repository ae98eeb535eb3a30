"""The worker: requests in, forward passes over leased pages, replies out."""

from __future__ import annotations

import bisect
import gc
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple

from kvtier.client import Lease, PoolMapping, Session
from kvtier.errors import CacheFullError, DrainingError, InvalidRequestError, KvtierError, SessionLostError
from kvtier.pages.layout import PageLayout
from kvtier.pages.recipe import Recipe
from kvtier.worker.admission import LEASE_GONE, Admission, Admitted, release
from kvtier.worker.chunk import Chunk
from kvtier.worker.model import WorkerModel
from kvtier.worker.options import WorkerOptions
from kvtier.worker.ranks import NO_OTHER_RANKS, Ranks
from kvtier.worker.rate import PrefillRate
from kvtier.worker.request import FinishReason, Reply, Request
from kvtier.worker.sampling import choose_tokens
from kvtier.worker.scheduler import Planned, plan_step
from kvtier.worker.sequence import Sequence
from kvtier.worker.step import StepRunner, StepRunners

_RETRY_S = 0.05  # between attempts to get a lease that the daemon could not give
_LEASE_WAIT_S = 0.01  # a lease on what the device has comes sooner; only promotions are overlapped with decoding
_TRY_AGAIN = (*LEASE_GONE, CacheFullError, DrainingError)


class _OnPool(NamedTuple):
    pool: PoolMapping
    runner: StepRunner


class Worker:
    """Runs the requests of one process on one model, several at a time.

    `submit` queues a request, `step` computes for all that run; whoever calls them does so from one thread. A request
    waits until the daemon has pages for it. A request whose lease is lost, or whose pages an older one needs, goes back
    to the queue with its tokens so far and begins anew on what the cache has of them.

    Args:
        session: attached with `model.identity(...)`, of the same `recipe` and of what `options` say.
        model: what runs.
        layout: of the identity.
        options: limits.
        recipe: how values become codes.
        ranks: the other ranks of a tensor-parallel model, of which `model` is rank 0.

    Raises `InvalidRequestError` when the session's pool is not where the model is.
    """

    def __init__(
        self,
        session: Session,
        model: WorkerModel,
        layout: PageLayout,
        options: WorkerOptions,
        recipe: Recipe,
        ranks: Ranks = NO_OTHER_RANKS,
    ) -> None:
        self._session = session
        self._model = model
        self._layout = layout
        self._options = options
        self._ranks = ranks
        self._runners = StepRunners(model, layout, options, recipe)
        self._open_pages = self._runners.open_pages
        self._admission = Admission(session, options.promotion_wait_s)
        self._known_pool: _OnPool | None = None
        self._rate = PrefillRate()
        self._num_submitted = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._retry_at_s = 0.0
        self._on_pool()  # says at once when the pool is not where the model is

    def submit(self, request: Request) -> Sequence:
        """Queues a request; the sequence has a `reply` once it is finished.

        Raises:
            InvalidRequestError: a token is no integer or not in the vocabulary, or prompt and reply can never fit in
                the model's context or the device pool.
        """
        sequence = Sequence(request, self._num_submitted, self._layout.page_size)
        self._check(sequence)
        self._num_submitted += 1
        self._waiting.append(sequence)
        return sequence

    def generate(self, request: Request) -> Reply:
        """Runs one request to its end, beside those that run already; raises the error that ended it early."""
        (reply,) = self.run([request])
        if reply.error:
            raise reply.error
        return reply

    def run(self, requests: Iterable[Request]) -> list[Reply]:
        """Runs requests together; replies in their order, failed ones with their `error`.

        What this raises, such as for a request that is refused, ends all of them.
        """
        sequences: list[Sequence] = []
        with ExitStack() as stack:
            for request in requests:
                sequences.append(self.submit(request))
                stack.callback(self.cancel, sequences[-1])
            while any(sequence.reply is None for sequence in sequences):
                self.step()
        return [sequence.reply for sequence in sequences if sequence.reply]

    def cancel(self, sequence: Sequence) -> None:
        """Ends a request now and gives its pages back; one that is finished stays as it is."""
        if sequence.reply is None:
            self._admission.withdraw(sequence)
            self._finish(sequence, FinishReason.CANCELLED)

    def close(self) -> None:
        """Ends the worker, which is not used any more; its leases end with the session."""
        self._admission.close()

    def step(self) -> None:
        """Starts what can start, then computes the next tokens of what runs; one forward pass at most."""
        self._admit()
        self._grow()
        # NOTE: the pool is read before the leases are checked. A lease that holds afterwards is of the session that the
        # pool belongs to, so page numbers are never looked up in another pool.
        on_pool = self._on_pool() if self._running else None
        if on_pool and not self._ranks.have(on_pool.pool.pool_id):
            on_pool = None  # they attach anew in their own time
        planned = [plan for plan in plan_step(self._running, self._options.step_tokens) if self._is_held(plan.sequence)]
        if on_pool and planned:
            self._compute(planned, on_pool)
        elif self._waiting:
            time.sleep(_RETRY_S)

    def _compute(self, planned: list[Planned], on_pool: _OnPool) -> None:
        started_s = time.perf_counter()
        chunks = [plan.chunk for plan in planned]
        valid_until_s = min(plan.sequence.lease.valid_until_s for plan in planned)
        unfinished = [plan.sequence for plan in planned]
        try:
            with self._ranks.computing(on_pool.pool.pool_id, valid_until_s, chunks):
                output = on_pool.runner.run(chunks)
                tokens = choose_tokens(*output, [plan.sequence.sampler for plan in planned])
            # NOTE: the tokens are here, so a GPU has computed the whole pass, and so have those of the other ranks,
            # without whose part of the last layer there would be no tokens: pages that are committed now are complete.
            prefilled = sum(len(plan.chunk.tokens) for plan in planned if not plan.chunk.is_decode)
            self._rate.add(prefilled, time.perf_counter() - started_s)
            for (sequence, chunk), token in zip(planned, tokens, strict=True):
                # NOTE: checked again, since the pages may have become another's while the pass was reading them.
                if self._is_held(sequence):
                    self._advance(sequence, chunk, token)
                unfinished.remove(sequence)
        except BaseException:
            # NOTE: it cannot be repeated: some layers have written over tokens that their pages would need. And these
            # pages are another's at once when they are given back, so what was launched on them has to end first.
            with ExitStack() as stack:
                for sequence in unfinished:
                    if sequence in self._running:
                        stack.callback(self._requeue, sequence)
                self._model.wait()
            raise

    def _advance(self, sequence: Sequence, chunk: Chunk, next_token: int) -> None:
        sequence.advance(chunk)
        # Before the token is taken: when this is interrupted, the sequence begins anew, and ends where it would have.
        self._attempt(sequence, sequence.commit_full_pages)
        if sequence.reply is None and chunk.end == len(sequence.tokens):
            reason = sequence.append_token(next_token)
            if reason:
                self._finish(sequence, reason)

    def _admit(self) -> None:
        """Starts waiting requests in their order, until one has to go on waiting.

        Nothing runs while nothing has a lease, so the first one is waited for; the others are not, beyond what a lease
        on pages of the device takes.
        """
        while True:
            if self._admission.is_idle:
                has_room = len(self._running) < self._options.max_sequences
                if not (self._waiting and has_room and time.monotonic() >= self._retry_at_s):
                    return
                rate = self._rate.tokens_per_second if self._options.recompute_when_cheaper else 0.0
                self._admission.ask(self._waiting[0], rate)
            admitted = self._admission.answer(_LEASE_WAIT_S if self._running else None)
            if admitted is None:
                return
            self._take_answer(admitted)

    def _take_answer(self, admitted: Admitted) -> None:
        sequence, answer = admitted
        if isinstance(answer, Lease):
            self._waiting.remove(sequence)
            sequence.start(answer, self._open_pages.take_slot())
            bisect.insort(self._running, sequence, key=_by_arrival)
        elif isinstance(answer, _TRY_AGAIN):
            self._wait(sequence, answer)
        else:
            self._finish(sequence, FinishReason.ERROR, answer)

    def _wait(self, sequence: Sequence, reason: KvtierError) -> None:
        """Leaves a refused request in the queue for the next attempt, unless it has waited for too long."""
        now_s = time.monotonic()
        self._retry_at_s = now_s + _RETRY_S
        if self._running and isinstance(reason, CacheFullError):
            return  # those that run will give pages back
        sequence.refused_since_s = sequence.refused_since_s or now_s
        if now_s - sequence.refused_since_s > self._options.patience_s:
            self._finish(sequence, FinishReason.ERROR, reason)

    def _grow(self) -> None:
        """Reserves the pages that the next tokens need, for the oldest first."""
        for sequence in tuple(self._running):
            while sequence in self._running and sequence.num_missing_pages > 0:
                self._attempt(sequence, sequence.grow)

    def _is_held(self, sequence: Sequence) -> bool:
        return self._attempt(sequence, sequence.lease.check)

    def _attempt(self, sequence: Sequence, action: Callable[[], object]) -> bool:
        """Runs something that needs the lease of `sequence`; False when it failed and the sequence runs no longer."""
        try:
            action()
        except LEASE_GONE:
            self._requeue(sequence)
        except CacheFullError:
            self._requeue(self._running[-1])  # the youngest gives its pages to the older ones
        except KvtierError as error:
            self._finish(sequence, FinishReason.ERROR, error)
        else:
            return True
        return False

    def _requeue(self, sequence: Sequence) -> None:
        lease = self._stop(sequence)
        sequence.restart()
        bisect.insort(self._waiting, sequence, key=_by_arrival)
        release(lease)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: KvtierError | None = None) -> None:
        sequence.finish(reason, error)
        if sequence in self._running:
            self._retry_at_s = 0.0  # its pages may be what the next one waits for
            release(self._stop(sequence))
        else:
            self._waiting.remove(sequence)

    def _stop(self, sequence: Sequence) -> Lease:
        """Ends its running; whoever calls this releases the lease behind all else, since that may be interrupted."""
        self._running.remove(sequence)
        self._open_pages.give_back(sequence.open_slot)
        return sequence.lease

    def _on_pool(self) -> _OnPool | None:
        """What runs steps over the session's pool, if that is not lost just now.

        Raises `InvalidRequestError` when it is not where the model is.
        """
        pool, known = self._session.pool, self._known_pool
        if known and known.pool is pool:
            return known
        try:
            memory = pool.memory
        except SessionLostError:
            return None
        known = self._known_pool = _OnPool(pool, self._runners.on(memory))
        pool.when_let_go(self._forget_pool)
        return known

    def _forget_pool(self) -> None:
        """Called by the session's thread: views of a lost pool would keep its memory, even while nothing runs."""
        self._known_pool = None
        gc.collect()  # torch's tensor parallelism leaves cycles behind that refer to the last step

    def _check(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.tokens) + sequence.request.max_new_tokens
        if num_tokens > self._model.max_tokens:
            raise InvalidRequestError(
                f"prompt and reply have up to {num_tokens} tokens; {self._model.name} takes {self._model.max_tokens}"
            )
        num_pages, pool_pages = -(-num_tokens // self._layout.page_size), self._session.pool.num_pages
        if num_pages > pool_pages:
            raise InvalidRequestError(
                f"prompt and reply need up to {num_pages} pages and the device pool has {pool_pages}; "
                "give the daemon a larger pool or ask for fewer tokens"
            )
        for token in (min(sequence.tokens), max(sequence.tokens)):
            if not 0 <= token < self._model.vocab_size:
                raise InvalidRequestError(f"token {token} is not in the vocabulary of {self._model.vocab_size} tokens")


def _by_arrival(sequence: Sequence) -> int:
    return sequence.number
