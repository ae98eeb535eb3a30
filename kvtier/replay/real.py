"""The real worker: a model on this machine, in real time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from kvtier.errors import CacheFullError, InvalidRequestError
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.recipe import PLAIN, Recipe, find_recipe
from kvtier.replay.engine import TIMEOUT_S, Attachment
from kvtier.replay.load import Load
from kvtier.replay.options import Memory
from kvtier.replay.tally import Served, Tally
from kvtier.replay.tokens import fold
from kvtier.worker import Reply, Request, Sequence, Worker, WorkerModel, WorkerOptions, connect_worker, load_model

_LONGEST_SLEEP_S = 0.5  # a load's time may be up before anybody is due

Wait: TypeAlias = "float | Sequence"
"""What a place waits for: a moment of `time.monotonic`, or the end of a request."""


@dataclass(frozen=True)
class RealEngine:
    """An `Engine` that runs a model. `recipe` is that of NVFP4 pages."""

    model: WorkerModel
    page_size: int
    recipe: Recipe

    @classmethod
    def load(cls, directory: Path, device: str | None, page_size: int, recipe: str) -> RealEngine:
        """Loads a model to `device`: the first GPU where None is given and there is one, and the CPU otherwise.

        Raises `InvalidRequestError` when kvtier cannot run it there.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        # The daemon needs a core too: threads of a forward pass that share theirs with it take many times longer.
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 2) // 2)))
        model = load_model(directory, device=device)
        return cls(model, page_size, find_recipe(recipe, model.revision))

    @property
    def name(self) -> str:
        return "real"

    @property
    def heading(self) -> str:
        context, vocabulary = self.model.max_tokens, self.model.vocab_size
        return (
            f"real worker, {self.model.name} on {self.model.device} with recipe {self.recipe.name} for NVFP4, context "
            f"of {context:,} tokens, token ids folded into {vocabulary:,}"
        )

    @property
    def device(self) -> str:
        return "shared-memory" if self.model.device.type == "cpu" else str(self.model.device)

    @property
    def shrink_factor(self) -> int:
        return 1

    def layout(self, page_format: PageFormat) -> PageLayout:
        return self.identity(page_format).layout

    def identity(self, page_format: PageFormat) -> CacheIdentity:
        return self.model.identity(page_format, self.page_size, recipe=self._recipe_of(page_format))

    def check(self, memory: Memory) -> None:
        """A model runs with any memory."""

    def run(self, attachment: Attachment, load: Load, tally: Tally) -> None:
        address, page_format, namespace = attachment
        options = WorkerOptions(max_sequences=len(load.start_delays_s))
        recipe = self._recipe_of(page_format)
        with connect_worker(address, self.model, page_format, self.page_size, options, TIMEOUT_S, recipe) as worker:
            RealReplay(worker, self.model.vocab_size, namespace, load, tally).run()

    def _recipe_of(self, page_format: PageFormat) -> Recipe:
        return self.recipe if page_format is PageFormat.NVFP4 else PLAIN


class RealReplay:
    """One load on one worker: each place has one session at a time, and the requests of all places run together."""

    def __init__(self, worker: Worker, vocab_size: int, namespace: str, load: Load, tally: Tally) -> None:
        self._worker = worker
        self._vocab_size = vocab_size
        self._namespace = namespace
        self._load = load
        self._tally = tally

    def run(self) -> None:
        """Replays until a place is free that no session is left for, or time is up; cancels what runs then."""
        started_s = time.monotonic()
        places = [self._place(started_s + delay_s) for delay_s in self._load.start_delays_s]
        waits = [next(place) for place in places]
        try:
            while not self._load.is_time_up:
                for number, wait in enumerate(waits):
                    if _is_over(wait):
                        following = next(places[number], None)
                        if following is None:
                            return
                        waits[number] = following
                self._step_or_sleep(waits)
        finally:
            self._tally.duration_s = time.monotonic() - started_s
            for wait in waits:
                if isinstance(wait, Sequence):
                    self._worker.cancel(wait)

    def _step_or_sleep(self, waits: list[Wait]) -> None:
        moments_s = [wait for wait in waits if isinstance(wait, float)]
        if len(moments_s) < len(waits):
            self._worker.step()
        else:
            time.sleep(min(max(min(moments_s) - time.monotonic(), 0.0), _LONGEST_SLEEP_S))

    def _place(self, start_s: float) -> Iterator[Wait]:
        """Sessions one after the other; yields what it waits for."""
        yield start_s
        for visit in self._load:
            for request in visit.requests:
                yield time.monotonic() + request.think_s
                # The reply is the model's own; the next prompt goes on with the one that the trace has.
                prompt = fold(request.prompt, self._vocab_size)
                try:
                    asked = Request(self._namespace, prompt.tolist(), max(1, request.output_tokens))
                    sequence = self._worker.submit(asked)
                except InvalidRequestError:  # it can never fit into the model's context or the device pool
                    self._tally.num_refused += 1
                    continue
                # Noted when it is sent: others may find what is computed of it long before its first token.
                findable_tokens = visit.endless.find_and_add(prompt)
                yield sequence
                if sequence.reply:
                    self._record(sequence.reply, findable_tokens)

    def _record(self, reply: Reply, findable_tokens: int) -> None:
        if isinstance(reply.error, CacheFullError):
            self._tally.num_refused += 1
        elif reply.error:
            raise reply.error
        else:
            statistics = reply.statistics
            self._tally.add(
                Served(
                    statistics.prompt_tokens,
                    len(reply.tokens),
                    statistics.found,
                    statistics.left.total,
                    findable_tokens,
                    statistics.time_to_first_token_s,
                )
            )


def _is_over(wait: Wait) -> bool:
    return time.monotonic() >= wait if isinstance(wait, float) else wait.reply is not None
