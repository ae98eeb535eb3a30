"""A small continuous-batching worker: any Hugging Face decoder with grouped-query attention on kvtier's pages.

    model = load_model("path/to/model")
    with connect_worker("unix:///run/kvtier.sock", model) as worker:
        reply = worker.generate(Request("tenant", prompt=[1, 2, 3], max_new_tokens=32))

It needs transformers (`pip install kvtier[worker]`).
"""

from kvtier.worker.chat import Conversation
from kvtier.worker.connect import connect_tensor_parallel, connect_worker
from kvtier.worker.engine import Worker
from kvtier.worker.model import WorkerModel, load_model, load_tokenizer, prepare_model
from kvtier.worker.options import OpenPage, PrefillAttends, WorkerOptions
from kvtier.worker.request import FinishReason, Reply, Request, RequestStatistics
from kvtier.worker.sampling import Sampling
from kvtier.worker.sequence import Sequence

__all__ = [
    "Conversation",
    "FinishReason",
    "OpenPage",
    "PrefillAttends",
    "Reply",
    "Request",
    "RequestStatistics",
    "Sampling",
    "Sequence",
    "Worker",
    "WorkerModel",
    "WorkerOptions",
    "connect_tensor_parallel",
    "connect_worker",
    "load_model",
    "load_tokenizer",
    "prepare_model",
]
