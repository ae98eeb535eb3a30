"""What can be set about a worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtier.errors import InvalidRequestError


class PrefillAttends(StrEnum):
    """What a prefill sees of the tokens that it computes itself; of those before, it sees what a decode sees.

    A long prompt is several prefills, so with `FRESH` its reply depends a little on where it was cut.
    """

    FRESH = "fresh"  # K and V as they are: the most exact first reply
    QUANTIZED = (
        "quantized"  # what a decode in the place of each token sees: a cold prompt and a cached one reply the same
    )


class OpenPage(StrEnum):
    """How a worker keeps the last, not yet full page of a sequence, until it is quantised once, whole.

    A decode sees what pages give back of every page that is full with its own token, and of the others what is kept.
    """

    BF16 = "bf16"  # 16 bits a value: the least loss
    FP8 = "fp8"  # E4M3, saturating at 448
    OFF = "off"  # not at all: every token is quantised at once


@dataclass(frozen=True)
class WorkerOptions:
    """Limits of a worker.

    Args:
        prefill_attends: what a prefill sees of the tokens that it computes itself; part of the cache's identity.
        open_page: how the last, not yet full page of a sequence is kept; part of the cache's identity.
        step_tokens: tokens of one forward pass. A longer prompt is computed in several, between which others decode.
        max_sequences: requests that run at the same time.
        promotion_wait_s: how long a request waits for pages of lower tiers before it computes them.
        recompute_when_cheaper: tells the daemon how fast this worker prefills, so that it leaves pages in a lower tier
            where moving them takes longer. Without it they are always moved.
        patience_s: how long a request waits for pages that other workers hold, or for a daemon that does not answer,
            before it fails.
        cuda_graphs: on a GPU, runs steps in which everything decodes as CUDA graphs.
    """

    prefill_attends: PrefillAttends = PrefillAttends.FRESH
    open_page: OpenPage = OpenPage.BF16
    step_tokens: int = 512
    max_sequences: int = 16
    promotion_wait_s: float = 2.0
    recompute_when_cheaper: bool = True
    patience_s: float = 30.0
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.max_sequences < self.step_tokens:
            raise InvalidRequestError(
                f"step_tokens is {self.step_tokens} and max_sequences {self.max_sequences}; a step must have room for "
                "one token of every sequence and more"
            )


DEFAULT_OPTIONS = WorkerOptions()
