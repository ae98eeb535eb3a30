"""What tests of the pool on a GPU share: bytes to and from it, and a model whose pages have a size of practice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver
from serving import other_identity, true_images

from kvtier.cuda_driver import CudaMemory, check

Images = npt.NDArray[np.uint8]

PAGE_SIZE = 16
IDENTITY = other_identity(num_layers=8, num_kv_heads=4, head_dim=128)
PAGE_BYTES = IDENTITY.layout.page_bytes
VOCAB_SIZE = IDENTITY.vocab_size
TENANT = "tenant"


def write_pages(memory: CudaMemory, pages: npt.NDArray[np.integer], images: Images) -> None:
    """Writes page images from host memory, and returns when they are on the GPU."""
    page_bytes = memory.shape[1]
    with memory.gpu.current():
        for page, image in zip(pages.tolist(), images, strict=True):
            assert image.flags.c_contiguous and image.nbytes == page_bytes
            check(driver.cuMemcpyHtoD(memory.address + page * page_bytes, image.ctypes.data, page_bytes), "write")


def read_pages(memory: CudaMemory, pages: npt.NDArray[np.integer]) -> Images:
    """The images of some pages."""
    page_bytes = memory.shape[1]
    images = np.empty((pages.size, page_bytes), dtype=np.uint8)
    with memory.gpu.current():
        for page, image in zip(pages.tolist(), images, strict=True):
            check(driver.cuMemcpyDtoH(image.ctypes.data, memory.address + page * page_bytes, page_bytes), "read")
    return images


def read_all(memory: CudaMemory) -> Images:
    """The images of all pages."""
    images = np.empty(memory.shape, dtype=np.uint8)
    with memory.gpu.current():
        check(driver.cuMemcpyDtoH(images.ctypes.data, memory.address, images.nbytes), "read")
    return images


def prompt(num_pages: int, seed: int) -> npt.NDArray[np.uint32]:
    """Tokens of a prompt that nobody else has."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_pages * PAGE_SIZE, dtype=np.uint32)


def images_of(tokens: npt.NDArray[np.uint32]) -> Images:
    """The bytes of a prompt's pages."""
    return true_images(IDENTITY, TENANT, tokens)


def start_worker(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A process of `pool_worker.py`; `options` of `Popen`."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(here / "pool_worker.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )
