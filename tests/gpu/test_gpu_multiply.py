"""Products of K and Q with the matrices of the recipe `full` on the GPU, against fp64 and the torch reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtier import ops
from kvtier.errors import InvalidRequestError
from kvtier.ops.reference import transform as reference
from kvtier.ops.reference.transform import Matrices

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
MANY_TOKENS = 3000  # of 16 query heads: more rows than any GPU takes for few


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch fills with NaN what it allocates."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _matrices(num_kv_heads: int, head_dim: int, generator: torch.Generator) -> Matrices:
    shape = (num_kv_heads, head_dim, head_dim)
    return Matrices(*(torch.randn(shape, device=generator.device, generator=generator).half() for _ in "kq"))


def _values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values of very different magnitudes, zeros among them."""
    values = torch.randn(shape, device=generator.device, generator=generator)
    exponents = torch.randint(-6, 7, (*shape[:-1], 1), device=generator.device, generator=generator)
    return (values * torch.exp2(exponents) * (values.abs() > 0.05)).to(dtype)


def _assert_is_product(found: torch.Tensor, values: torch.Tensor, matrices: torch.Tensor) -> None:
    """`found` is the exact product, but for sums in fp32 and one rounding."""
    assert found.shape == values.shape and found.dtype is values.dtype
    num_tokens, num_heads, head_dim = values.shape
    rows = values.half().double().reshape(num_tokens, len(matrices), num_heads // len(matrices), head_dim)
    exact = torch.einsum("nkgd,kde->nkge", rows, matrices.double()).reshape(values.shape)
    magnitudes = torch.einsum("nkgd,kde->nkge", rows.abs(), matrices.double().abs()).reshape(values.shape)
    allowed = torch.finfo(values.dtype).eps / 2 * exact.abs() + 2.0**-18 * magnitudes
    assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "group"),
    [(1, 1, 1), (1, 8, 8), (64, 8, 8), (7, 3, 5), (333, 3, 5), (2, 4, 6), (MANY_TOKENS, 1, 16), (MANY_TOKENS, 3, 7)],
)
def test_products_are_exact_but_for_rounding(
    device: torch.device, dtype: torch.dtype, head_dim: int, num_tokens: int, num_kv_heads: int, group: int
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    matrices = _matrices(num_kv_heads, head_dim, generator)
    shape = (num_tokens, num_kv_heads * (group + 2), head_dim)
    fused = _values(shape, dtype, generator)  # Q, K and V of a fused projection
    query, key = fused[:, : num_kv_heads * group], fused[:, num_kv_heads * group : num_kv_heads * (group + 1)]
    products = [
        (ops.transform_queries(query, matrices), query, matrices.query),
        (ops.transform_keys(key, matrices), key, matrices.key),
    ]
    torch.use_deterministic_algorithms(False)  # which refuse the products to compare with
    for found, values, side in products:
        _assert_is_product(found, values, side)
        _assert_is_product(reference.multiplied(values, side), values, side)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_at_random_lengths(device: torch.device, head_dim: int, group: int) -> None:
    generator = torch.Generator(device).manual_seed(group)
    matrices = _matrices(2, head_dim, generator)
    for num_tokens in torch.randint(1, 3000, (4,), generator=torch.Generator().manual_seed(head_dim + group)).tolist():
        query = _values((num_tokens, 2 * group, head_dim), torch.bfloat16, generator)
        _assert_is_product(ops.transform_queries(query, matrices), query, matrices.query)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_row_does_not_depend_on_how_many_there_are(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    generator = torch.Generator(device).manual_seed(1)
    matrices = _matrices(2, head_dim, generator)
    query = _values((MANY_TOKENS, 32, head_dim), dtype, generator)
    together = ops.transform_queries(query, matrices)
    for tokens in (slice(0, 1), slice(1000, 1064), slice(MANY_TOKENS - 3, MANY_TOKENS)):
        assert torch.equal(ops.transform_queries(query[tokens], matrices), together[tokens])


@pytest.mark.parametrize("layout", ["heads first", "unaligned", "every second head"])
def test_any_strides_are_read(device: torch.device, layout: str) -> None:
    generator = torch.Generator(device).manual_seed(2)
    matrices = _matrices(2, 128, generator)
    match layout:
        case "heads first":
            query = _values((6, 50, 128), torch.bfloat16, generator).transpose(0, 1)
        case "unaligned":
            query = _values((50, 6, 129), torch.bfloat16, generator)[..., 1:]
        case _:
            query = _values((50, 12, 128), torch.bfloat16, generator)[:, ::2]
    _assert_is_product(ops.transform_queries(query, matrices), query, matrices.query)


def test_matrices_may_be_transposed_views(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    matrices = _matrices(2, 128, generator).query.transpose(1, 2)
    query = _values((9, 4, 128), torch.float16, generator)
    _assert_is_product(ops.transform_queries(query, Matrices(matrices, matrices)), query, matrices)


def test_infinities_and_nan_stay_in_their_rows(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(4)
    matrices = _matrices(1, 64, generator)
    query = _values((40, 1, 64), torch.bfloat16, generator)
    query[3, 0, 5], query[20, 0, 63], query[39, 0, 0] = torch.inf, torch.nan, 1e30  # the last is none of fp16
    found = ops.transform_queries(query, matrices)
    bad = ~found.isfinite().all(-1).flatten()
    assert bad.nonzero().flatten().tolist() == [3, 20, 39]
    assert torch.equal(found.isnan(), reference.multiplied(query, matrices.query).isnan())


@pytest.mark.parametrize("num_tokens", [5, MANY_TOKENS])
def test_what_the_kernel_before_wrote_is_read(device: torch.device, num_tokens: int) -> None:
    """Each kernel may be on the chip while the one before still runs, be it torch's or another transform."""
    generator = torch.Generator(device).manual_seed(5)
    query = torch.empty(num_tokens, 32, 128, dtype=torch.bfloat16, device=device)
    matrices = Matrices(*torch.empty(2, 4, 128, 128, dtype=torch.float16, device=device))
    inputs, found = [], []
    for _ in range(20):
        query.normal_(generator=generator)
        for matrix in matrices:
            matrix.normal_(std=0.1, generator=generator)
        found.append(ops.transform_keys(ops.transform_queries(query, matrices), matrices))
        inputs.append((query.clone(), *(matrix.clone() for matrix in matrices)))
    for (one_query, key_matrices, query_matrices), one_found in zip(inputs, found, strict=True):
        torch.cuda.synchronize()
        first = ops.transform_queries(one_query, Matrices(key_matrices, query_matrices))
        torch.cuda.synchronize()
        assert torch.equal(one_found, ops.transform_keys(first, Matrices(key_matrices, query_matrices)))
        _assert_is_product(one_found, first, key_matrices)


@pytest.mark.parametrize("num_tokens", [64, MANY_TOKENS])
def test_graphs_replay_with_new_values(device: torch.device, num_tokens: int) -> None:
    generator = torch.Generator(device).manual_seed(6)
    matrices = _matrices(8, 128, generator)
    query = torch.zeros(num_tokens, 64, 128, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the kernel is compiled and loaded while the graph is captured
        found = ops.transform_queries(query, matrices)
    for _ in range(3):
        query.copy_(_values(query.shape, torch.bfloat16, generator))
        graph.replay()
        assert torch.equal(found, ops.transform_queries(query, matrices))
        _assert_is_product(found, query, matrices.query)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens_are_no_tokens(device: torch.device, dtype: torch.dtype) -> None:
    matrices = _matrices(2, 64, torch.Generator(device).manual_seed(7))
    found = ops.transform_queries(torch.empty(0, 6, 64, dtype=dtype, device=device), matrices)
    assert found.shape == (0, 6, 64) and found.dtype is dtype


@pytest.mark.parametrize("shape", [(4, 64, 64), (2, 128, 128), (2, 64, 128)])
def test_matrices_of_another_geometry_are_refused(device: torch.device, shape: tuple[int, ...]) -> None:
    query = torch.ones(2, 6, 64, dtype=torch.bfloat16, device=device)
    matrices = torch.ones(shape, dtype=torch.float16, device=device)
    with pytest.raises(InvalidRequestError, match="need fp16 \\(KV heads, 64, 64\\)"):
        ops.transform_queries(query, Matrices(matrices, matrices))
