"""The fingerprint: one digest of everything that must agree before two processes may share a page."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from kvtier.errors import InvalidRequestError
from kvtier.pages.layout import LAYOUT_VERSION, PageLayout

DIGEST_BYTES = 32


@dataclass(frozen=True)
class CacheIdentity:
    """What a worker states when it attaches.

    Args:
        model: name of the model, for people and for the digest.
        revision: digest or tag of the weights.
        vocab_size: token ids are below it.
        layout: geometry and format of the pages.
        rope: canonical text of the rotary embedding's settings; they change the stored keys.
        recipe: digest of how values become codes (global scales, block-scale rule, transforms).
        rank, world_size: which of how many tensor-parallel ranks holds these heads. The ranks of a model have one tree,
            which goes by the fingerprint of rank 0.
        layout_version: version of the page image.
    """

    model: str
    revision: str
    vocab_size: int
    layout: PageLayout
    rope: str = ""
    recipe: str = "plain"
    rank: int = 0
    world_size: int = 1
    layout_version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidRequestError("the model's name is empty; give the name or path that the worker loads")
        if not 0 < self.vocab_size < 2**31:
            raise InvalidRequestError(f"vocab_size is {self.vocab_size}; it must be positive and below 2^31")
        if not 0 <= self.rank < self.world_size:
            raise InvalidRequestError(f"rank is {self.rank} of {self.world_size}; it must be 0 to world_size - 1")
        if self.layout_version != LAYOUT_VERSION:
            raise InvalidRequestError(
                f"page layout version {self.layout_version} is not {LAYOUT_VERSION}, which this release reads; "
                "run the same kvtier release in daemon and worker"
            )

    def of_rank(self, rank: int) -> CacheIdentity:
        """The identity of another rank of the same model."""
        return replace(self, rank=rank)

    @property
    def fingerprint(self) -> bytes:
        """BLAKE2b-256 of every field as UTF-8, each behind its length as little-endian uint32."""
        layout = self.layout
        fields = (
            self.layout_version,
            self.model,
            self.revision,
            self.vocab_size,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            layout.page_size,
            layout.page_format.value,
            self.rope,
            self.recipe,
            self.rank,
            self.world_size,
        )
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"kvtier identity")
        for field in fields:
            encoded = str(field).encode()
            digest.update(len(encoded).to_bytes(4, "little"))
            digest.update(encoded)
        return digest.digest()
