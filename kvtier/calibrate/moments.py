"""Second moments of the queries and keys of every layer, and the forward passes that give them.

Sums are kept, never the queries and keys themselves, and after each window they go to a file: a run that was killed
goes on behind its last whole window, and comes to the same bytes as one that was not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvtier.calibrate.texts import Texts
from kvtier.errors import InvalidRequestError
from kvtier.ops import prefill_attention
from kvtier.worker import WorkerModel
from kvtier.worker.attention import LayerCall

FILE_FORMAT = "kvtier moments 1"


@dataclass
class Moments:
    """Sums over the first `num_windows` windows.

    Shapes: `keys` and `queries` are `(L, Hkv, D, D)` fp64, the sums of k^T k and of q^T q, with the queries of all
    heads that share a KV head; both after the rotary embedding, at the positions where they stood.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    num_windows: int = 0

    @staticmethod
    def empty(model: WorkerModel) -> Moments:
        """Those of no window."""
        num_layers, num_kv_heads, head_dim, _ = model.geometry
        shape = (num_layers, num_kv_heads, head_dim, head_dim)
        return Moments(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))

    def add(self, model: WorkerModel, window: tuple[int, ...]) -> None:
        """Runs the model over one more window."""
        tokens = torch.tensor([window], device=model.module.device)
        positions = torch.arange(len(window), device=model.module.device).unsqueeze(0)
        with torch.inference_mode():
            model.module(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                kvtier_batch=_Recorder(self),
            )
        self.num_windows += 1

    def save(self, path: Path, source: str) -> None:
        """Writes them to `path`, whole or not at all; `source` names the windows and the model."""
        metadata = {"format": FILE_FORMAT, "source": source, "num_windows": str(self.num_windows)}
        partial = path.with_name(f"{path.name}.partial")
        save_file({"keys": self.keys, "queries": self.queries}, partial, metadata)
        partial.replace(path)

    def load(self, path: Path, source: str) -> bool:
        """Takes up what `save` left at `path`; False, and nothing changed, when that is no such file of `source`."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                keys, queries = file.get_tensor("keys"), file.get_tensor("queries")
            num_windows = int(metadata.get("num_windows", 0))
        except (OSError, SafetensorError, ValueError):
            return False
        same = (metadata.get("format"), metadata.get("source")) == (FILE_FORMAT, source)
        if not (same and keys.shape == queries.shape == self.keys.shape):
            return False
        self.keys, self.queries, self.num_windows = keys, queries, num_windows
        return True


class _Recorder:
    """An attention batch of one sequence that adds what every layer sees to `moments`."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def attend(self, call: LayerCall) -> torch.Tensor:
        num_kv_heads = call.key.shape[1]
        self._moments.keys[call.layer] += _second_moments(call.key, num_kv_heads)
        self._moments.queries[call.layer] += _second_moments(call.query, num_kv_heads)
        return prefill_attention(
            call.query, call.key, call.value, call.softmax_scale, call.sliding_window, call.logit_softcap
        )


def collect_moments(
    model: WorkerModel,
    texts: Texts,
    partial: Path,
    on_window: Callable[[int], None],
    on_message: Callable[[str], None],
) -> Moments:
    """Moments over all windows of `texts`, resumed from `partial` if that belongs to them.

    `on_window` is told the tokens that are done, and `on_message` what became of a `partial` that was there.
    Raises `InvalidRequestError` when `partial` cannot be written.
    """
    moments = Moments.empty(model)
    source = _source_of(model, texts)
    if partial.exists():
        if moments.load(partial, source):
            on_message(f"going on behind window {moments.num_windows} of {len(texts.windows)}, from {partial}")
        else:
            on_message(f"{partial} is damaged or of another calibration: beginning anew")
    while True:
        on_window(sum(map(len, texts.windows[: moments.num_windows])))
        if moments.num_windows == len(texts.windows):
            return moments
        moments.add(model, texts.windows[moments.num_windows])
        try:
            moments.save(partial, source)
        except (OSError, SafetensorError) as error:
            raise InvalidRequestError(f"cannot write {partial}: {error}") from error


def _second_moments(values: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """`(Hkv, D, D)` fp64 of `values` `(T, H, D)`."""
    rows = torch.unflatten(values.float(), 1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    return (rows.mT @ rows).to("cpu", torch.float64)


def _source_of(model: WorkerModel, texts: Texts) -> str:
    """A digest of all that decides the moments."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvtier moments")
    digest.update(f"{model.revision} {model.dtype} {texts.windows}".encode())
    return digest.hexdigest()
