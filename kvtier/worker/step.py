"""One forward pass over the next tokens of all that runs, as a CUDA graph where it can be one.

A step that prefills anything has a size of its own: it runs eagerly, as a `PackedBatch`. Between two of those there are
many steps in which all sequences decode, and each does the same as the one before to other numbers. On a GPU such a
step is one replay of a graph that was captured of a `DecodeBatch`; launching its kernels one by one would take longer
than they run. Both compute the same and may follow each other in any order, for all that lasts from one step to the
next lies in pages and open pages.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch

from kvtier.client.pool import PoolMemory
from kvtier.errors import InvalidRequestError, KernelError
from kvtier.ops import FixedDecode
from kvtier.pages.layout import PageLayout
from kvtier.pages.recipe import Recipe
from kvtier.worker.batch import PackedBatch, PagedKv
from kvtier.worker.chunk import Chunk
from kvtier.worker.decode_batch import DecodeBatch, MakeDecode
from kvtier.worker.model import WorkerModel
from kvtier.worker.open_pages import OpenPageStore
from kvtier.worker.options import PrefillAttends, WorkerOptions


class StepOutput(NamedTuple):
    """What a step computed; it may not be there yet, and the next step may write over it.

    Attributes:
        logits: `(rows, vocabulary)`.
        likeliest: `(rows,)` int64, their largest.
        rows: where the logits of the next token of every chunk are.
    """

    logits: torch.Tensor
    likeliest: torch.Tensor
    rows: list[int]


class StepRunner:
    """Runs steps over one pool.

    Its decode batches have 1, 2, 4, ... rows, up to one for every slot of the open pages; a step takes the smallest
    that has a row for every slot in use.
    """

    def __init__(
        self,
        model: WorkerModel,
        pages: PagedKv,
        open_pages: OpenPageStore,
        prefill_attends: PrefillAttends,
        uses_graphs: bool = True,
        make_decode: MakeDecode = FixedDecode,
    ) -> None:
        self.pages = pages
        self._model = model
        self._open_pages = open_pages
        self._prefill_attends = prefill_attends
        self._uses_graphs = uses_graphs and pages.device.type == "cuda"
        self._make_decode = make_decode
        self._graphs: dict[int, DecodeGraph] = {}

    def run(self, chunks: Items[Chunk]) -> StepOutput:
        """Computes `chunks`, those of decodes first, at most one of a sequence."""
        if self._uses_graphs and all(chunk.is_decode for chunk in chunks):
            graph = self._graph_for(chunks)
            output = graph.run(chunks)
            self._uses_graphs = graph.is_captured
            return output
        batch = PackedBatch(chunks, self.pages, self._open_pages, self._prefill_attends)
        return _output(self._model.forward(batch), list(range(len(chunks))))

    def _graph_for(self, chunks: Items[Chunk]) -> DecodeGraph:
        num_needed = 1 + max(chunk.open_slot for chunk in chunks)
        num_rows = min(1 << (num_needed - 1).bit_length(), self._open_pages.num_slots)
        graph = self._graphs.get(num_rows)
        if graph is None:
            max_pages = min(-(-self._model.max_tokens // self.pages.layout.page_size), self.pages.num_pages)
            batch = DecodeBatch(num_rows, max_pages, self.pages, self._open_pages, self._make_decode)
            graph = self._graphs[num_rows] = DecodeGraph(self._model, batch)
        return graph


class StepRunners:
    """Makes what runs steps over the pools that a session has one after the other.

    Attributes:
        open_pages: for all of them.
    """

    def __init__(self, model: WorkerModel, layout: PageLayout, options: WorkerOptions, recipe: Recipe) -> None:
        self.open_pages = OpenPageStore(layout, options.open_page, options.max_sequences, model.device)
        self._model = model
        self._layout = layout
        self._options = options
        self._recipe = recipe.of_rank(model.rank, model.world_size)

    def on(self, memory: PoolMemory) -> StepRunner:
        """Raises `InvalidRequestError` when the pool is not where the model is."""
        pages = PagedKv.of(memory, self._layout, self._recipe, self._model.dtype)
        if pages.device != self._model.device:
            raise InvalidRequestError(
                f"the daemon's pool is on {pages.device} and the model on {self._model.device}; load the model on "
                f"{pages.device}, or give the daemon a pool there"
            )
        attends, uses_graphs = self._options.prefill_attends, self._options.cuda_graphs
        return StepRunner(self._model, pages, self.open_pages, attends, uses_graphs)


class DecodeGraph:
    """A decode batch and, behind its first step, the CUDA graph of its steps."""

    def __init__(self, model: WorkerModel, batch: DecodeBatch) -> None:
        self._model = model
        self._batch = batch
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: StepOutput | None = None

    @property
    def is_captured(self) -> bool:
        """False before the first step, and behind it where no graph can be captured."""
        return self._captured is not None

    def run(self, chunks: Items[Chunk]) -> StepOutput:
        """Computes `chunks` of one token."""
        self._batch.fill(chunks)
        rows = [chunk.open_slot for chunk in chunks]
        if self._graph is not None and self._captured is not None:
            self._graph.replay()
            return self._captured._replace(rows=rows)
        output = _output(self._model.forward(self._batch), rows)
        if self._batch.is_capturable:
            self._capture()
        return output

    def _capture(self) -> None:
        """Raises `KernelError` when the model does what cannot be captured.

        NOTE: the step that ran before has compiled and allocated all that must not be while a graph is captured.
        """
        graph = torch.cuda.CUDAGraph()
        # NOTE: both on the model's GPU, which need not be torch's current one: torch captures there only what is there.
        with torch.cuda.device(self._model.device):
            outside = torch.cuda.current_stream()
            try:
                # What other threads do with the GPU, such as freeing memory, is not part of it.
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                    captured = _output(self._model.forward(self._batch), [])
            except RuntimeError as error:
                torch.cuda.set_stream(outside)  # a capture that fails leaves its own
                raise KernelError(
                    f"no CUDA graph can be captured of a decode step of {self._model.name}: {error}; if the model "
                    "waits for the GPU within its forward pass, set WorkerOptions.cuda_graphs to False"
                ) from error
        self._graph, self._captured = graph, captured


def _output(logits: torch.Tensor, rows: list[int]) -> StepOutput:
    return StepOutput(logits, logits.argmax(-1), rows)
