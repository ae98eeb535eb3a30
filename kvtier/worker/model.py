"""A Hugging Face causal language model that a worker can run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvtier.errors import InvalidRequestError
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.worker.attention import ATTENTION_NAME, register_attention
from kvtier.worker.geometry import ModelGeometry, check_architecture, inspect_model
from kvtier.worker.identity import rope_text, weights_digest


class PrefillAttends(StrEnum):
    """What a prefill sees of the tokens that it computes itself."""

    FRESH = "fresh"  # K and V as they are: the most exact first reply
    QUANTIZED = "quantized"  # K and V as they are read back from pages: a cold prompt and a cached one reply the same


@dataclass(frozen=True)
class WorkerModel:
    """A model that runs with kvtier's attention.

    `name` and `revision` name its weights in the fingerprint; `max_tokens` is the longest sequence that it takes.
    """

    module: PreTrainedModel
    name: str
    revision: str
    geometry: ModelGeometry
    vocab_size: int
    max_tokens: int

    def identity(
        self,
        page_format: PageFormat,
        page_size: int = 64,
        prefill_attends: PrefillAttends = PrefillAttends.FRESH,
    ) -> CacheIdentity:
        """What a session attaches with.

        The dtype of the arithmetic and what a prefill attends to are part of it, since the stored values depend on both.
        """
        layout = PageLayout(
            page_format, self.geometry.num_layers, self.geometry.num_kv_heads, self.geometry.head_dim, page_size
        )
        dtype = str(self.module.dtype).removeprefix("torch.")
        recipe = "plain" if prefill_attends is PrefillAttends.FRESH else "plain, prefill attends to quantized"
        return CacheIdentity(
            model=self.name,
            revision=f"{self.revision}, {dtype}",
            vocab_size=self.vocab_size,
            layout=layout,
            rope=rope_text(self.module.config.get_text_config().to_dict()),
            recipe=recipe,
        )


def load_model(
    path: str | Path, gguf_file: str | None = None, dtype: torch.dtype = torch.float32, revision: str | None = None
) -> WorkerModel:
    """The model in a local directory; nothing is downloaded.

    Args:
        path: a Hugging Face directory, or one that holds a GGUF file.
        gguf_file: name of the GGUF file in `path`.
        dtype: of the weights in memory and of the arithmetic.
        revision: names the weights; the digest of the weight files when it is not given.

    Raises:
        InvalidRequestError: there is no model at `path`, or kvtier cannot run it; the message names why.
    """
    directory = _directory(path)
    module = AutoModelForCausalLM.from_pretrained(directory, gguf_file=gguf_file, dtype=dtype, local_files_only=True)
    name = Path(gguf_file).stem if gguf_file else directory.name
    return prepare_model(module, name, revision or weights_digest(directory, gguf_file))


def load_tokenizer(path: str | Path, gguf_file: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model; nothing is downloaded."""
    return AutoTokenizer.from_pretrained(_directory(path), gguf_file=gguf_file, local_files_only=True)


def prepare_model(module: PreTrainedModel, name: str, revision: str) -> WorkerModel:
    """Makes a loaded model run with kvtier's attention; raises `InvalidRequestError` when it cannot."""
    check_architecture(module)
    register_attention()
    module.set_attn_implementation(ATTENTION_NAME)
    config = module.config.get_text_config()
    return WorkerModel(
        module=module.eval(),
        name=name,
        revision=revision,
        geometry=inspect_model(module),
        vocab_size=config.vocab_size,
        max_tokens=config.max_position_embeddings,
    )


def _directory(path: str | Path) -> Path:
    directory = Path(path).resolve()
    if not directory.is_dir():
        raise InvalidRequestError(f"{path} is not a directory; give a local directory with a Hugging Face model")
    return directory
