"""A Hugging Face causal language model that a worker can run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvtier.errors import InvalidRequestError
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.recipe import PLAIN, Recipe, find_recipe
from kvtier.worker.attention import ATTENTION_NAME, ModelBatch, register_attention
from kvtier.worker.geometry import ModelGeometry, check_architecture, inspect_model
from kvtier.worker.identity import CONFIG_NAME, rope_text, weights_digest
from kvtier.worker.options import OpenPage, PrefillAttends


@dataclass(frozen=True)
class WorkerModel:
    """A model that runs with kvtier's attention.

    `name` and `revision` name its weights in the fingerprint; `max_tokens` is the longest sequence that it takes. Of a
    tensor-parallel model it is the part of one rank, and so is `geometry`.
    """

    module: PreTrainedModel
    name: str
    revision: str
    geometry: ModelGeometry
    vocab_size: int
    max_tokens: int
    rank: int = 0
    world_size: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the arithmetic."""
        return self.module.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are; the pool must be there too."""
        return self.module.device

    def wait(self) -> None:
        """Returns when nothing runs any more that was launched on its device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forward(self, batch: ModelBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Computes a batch and writes its pages and open pages.

        The logits of the next token, `(rows, vocabulary)`, behind the tokens in `rows` of the packed row, int64; behind
        the last token of every chunk when they are not given.
        """
        with torch.inference_mode():
            output = self.module(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.last_rows if rows is None else rows,
                kvtier_batch=batch,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def default_recipe(self, page_format: PageFormat) -> Recipe:
        """For NVFP4 pages what kvtier ships for these weights, else `SEARCH`; other pages hold values as they are."""
        return _shipped_or_search(self.revision) if page_format is PageFormat.NVFP4 else PLAIN

    def identity(
        self,
        page_format: PageFormat,
        page_size: int = 64,
        prefill_attends: PrefillAttends = PrefillAttends.FRESH,
        open_page: OpenPage = OpenPage.BF16,
        recipe: Recipe | None = None,
    ) -> CacheIdentity:
        """What a session attaches with.

        The dtype of the arithmetic, what a prefill attends to and how open pages are kept are part of it: the stored
        values depend on them. So is `recipe`; None is `default_recipe`. Raises `InvalidRequestError` when it is another
        model's.
        """
        recipe = recipe or self.default_recipe(page_format)
        num_layers, num_kv_heads, head_dim, _ = self.geometry
        recipe.check_fits(self.name, self.revision, num_layers, num_kv_heads * self.world_size, head_dim)
        layout = PageLayout(page_format, num_layers, num_kv_heads, head_dim, page_size)
        dtype = str(self.dtype).removeprefix("torch.")
        return CacheIdentity(
            model=self.name,
            revision=f"{self.revision}, {dtype}",
            vocab_size=self.vocab_size,
            layout=layout,
            rope=rope_text(self.module.config.get_text_config().to_dict()),
            recipe="; ".join(
                (
                    recipe.digest,
                    f"scales by {recipe.block_scales.rule}",
                    f"open page {open_page}",
                    f"prefill attends to {prefill_attends}",
                )
            ),
            rank=self.rank,
            world_size=self.world_size,
        )


def device_uuids(devices: Sequence[torch.device]) -> list[str]:
    """The GPUs, as nvidia-smi prints them; none when the devices are CPUs."""
    if any(device.type == "cpu" for device in devices):
        return []
    from kvtier.cuda_driver import gpus

    return [gpus()[device.index or 0].uuid for device in devices]


@functools.cache
def _shipped_or_search(revision: str) -> Recipe:
    """Loaded, or said not to be there, once."""
    return find_recipe("shipped", revision)


def load_model(
    path: str | Path,
    gguf_file: str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    device: str | torch.device = "cpu",
) -> WorkerModel:
    """The model in a local directory; nothing is downloaded.

    Args:
        path: a Hugging Face directory, or one that holds a GGUF file.
        gguf_file: name of the GGUF file in `path`; not needed when it is the only model there.
        dtype: of the weights in memory and of the arithmetic; None is BF16 on a GPU and FP32 on the CPU.
        revision: names the weights; the digest of the weight files when it is not given.
        device: where it runs, such as "cuda:0": where the daemon's pool is.

    Raises:
        InvalidRequestError: there is no model at `path`, or kvtier cannot run it; the message names why.
    """
    directory, gguf_file = _locate(path, gguf_file)
    device = torch.device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    module = AutoModelForCausalLM.from_pretrained(directory, gguf_file=gguf_file, dtype=dtype, local_files_only=True)
    torch.nn.Module.to(module, device)
    name = Path(gguf_file).stem if gguf_file else directory.name
    return prepare_model(module, name, revision or weights_digest(directory, gguf_file))


def load_tokenizer(path: str | Path, gguf_file: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that `load_model` loads with the same arguments; nothing is downloaded."""
    directory, gguf_file = _locate(path, gguf_file)
    return AutoTokenizer.from_pretrained(directory, gguf_file=gguf_file, local_files_only=True)


def prepare_model(module: PreTrainedModel, name: str, revision: str) -> WorkerModel:
    """Makes a loaded model run with kvtier's attention; raises `InvalidRequestError` when it cannot."""
    check_architecture(module)
    register_attention()
    module.set_attn_implementation(ATTENTION_NAME)
    module.train(False)
    config = module.config.get_text_config()
    return WorkerModel(
        module=module,
        name=name,
        revision=revision,
        geometry=inspect_model(module),
        vocab_size=config.vocab_size,
        max_tokens=config.max_position_embeddings,
    )


def _locate(path: str | Path, gguf_file: str | None) -> tuple[Path, str | None]:
    """The directory of a model, and its GGUF file when it is one."""
    directory = Path(path).resolve()
    if (directory / CONFIG_NAME).is_file() and gguf_file is None:
        return directory, None
    found = sorted(file.name for file in directory.glob("*.gguf"))
    if gguf_file is None and len(found) == 1:
        return directory, found[0]
    if gguf_file is None or gguf_file not in found:
        raise InvalidRequestError(
            f"no model at {path}: give a directory with {CONFIG_NAME} or with one GGUF file, or name the file"
        )
    return directory, gguf_file
