"""The decode kernel against fp64 over random cases, in CUDA graphs, and against the torch reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from decode_cases import HEAD_DIMS, PAGE_SIZES, exact_attention, random_case

from kvtier import ops
from kvtier.errors import InvalidRequestError
from kvtier.ops import AttentionResult, DecodeWorkspace, GlobalScales
from kvtier.ops.cuda.loader import kernels
from kvtier.ops.cuda.variants import decode_variant
from kvtier.ops.reference import attention as reference
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.views import layer_view

MAX_RELATIVE_ERROR = 3e-3
CASES_A_TEST = 12
NUM_TESTS = 32


@pytest.fixture(scope="module", autouse=True)
def compiled_in_parallel(device: torch.device) -> None:
    """Compiles all variants at once: one after the other takes most of the time of these tests."""
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    variants = [decode_variant(head_dim, group, shared_bytes) for head_dim in HEAD_DIMS for group in (8, 16)]
    macros = [v.macros(d, page) for v in variants for d in (torch.bfloat16, torch.float16) for page in PAGE_SIZES]
    capability = torch.cuda.get_device_capability(device)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda of: kernels().cubin("decode_attention", of, capability), macros))


def _poison_free_memory(device: torch.device) -> None:
    """What the kernel allocates next for outputs and scratch holds NaN."""
    torch.full((64 << 20,), torch.nan, device=device)
    for num_floats in (1 << 10, 1 << 16, 1 << 20):
        torch.full((num_floats,), torch.nan, device=device)


@pytest.mark.parametrize("chunk", range(NUM_TESTS))
def test_random_cases_equal_fp64(device: torch.device, chunk: int) -> None:
    for seed in range(chunk * CASES_A_TEST, (chunk + 1) * CASES_A_TEST):
        case = random_case(seed, device)
        _poison_free_memory(device)
        found = ops.decode_attention(*case.arguments)
        out, lse = exact_attention(case)
        is_empty = lse == -torch.inf
        assert torch.equal(found.lse == -torch.inf, is_empty), f"seed {seed}"
        assert not found.out[is_empty].any(), f"seed {seed}"
        error = (found.out.double() - out).norm() / out.norm().clamp(min=1e-30)
        assert float(error) <= MAX_RELATIVE_ERROR, f"seed {seed}"
        torch.testing.assert_close(found.lse.double()[~is_empty], lse[~is_empty], rtol=0, atol=2e-3)


def test_reference_agrees_with_fp64(device: torch.device) -> None:
    """So that the reference is right about open pages too."""
    for seed in range(0, 384, 19):
        case = random_case(seed, device)
        out, lse = exact_attention(case)
        found = reference.decode_attention(*case.arguments)
        error = (found.out.double() - out).norm() / out.norm().clamp(min=1e-30)
        assert float(error) <= MAX_RELATIVE_ERROR, f"seed {seed}"
        assert torch.equal(found.lse == -torch.inf, lse == -torch.inf), f"seed {seed}"


def test_results_are_the_same_every_time_and_with_a_workspace(device: torch.device) -> None:
    workspace = DecodeWorkspace(device, max_sequences=70, num_kv_heads=8)
    for seed in (7, 20, 33):
        case = random_case(seed, device)
        first = ops.decode_attention(*case.arguments)
        for _ in range(3):
            again = ops.decode_attention(*case.arguments, workspace=workspace)
            assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
        assert not workspace.arrivals.any()


def test_a_graph_stays_right_while_lengths_grow(device: torch.device) -> None:
    """As an engine decodes: append and attention captured once, replayed for every token."""
    layout = PageLayout(PageFormat.NVFP4, 2, 4, 128, 64)
    pool = torch.zeros(40, layout.page_bytes, dtype=torch.uint8, device=device)
    view, scales = layer_view(pool, layout, 1), GlobalScales(0.5, 2.0)
    table = torch.randperm(40, device=device).int().view(2, 20)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    key, value = torch.zeros(2, 2, 4, 128, dtype=torch.bfloat16, device=device)
    query = torch.zeros(2, 20, 128, dtype=torch.bfloat16, device=device)
    workspace = DecodeWorkspace(device, 2, 4)

    def step() -> AttentionResult:
        pages = table.gather(1, (lengths // 64).long().unsqueeze(1)).squeeze(1)
        ops.quantize_append(view, key, value, pages.long() * 64 + lengths % 64, scales)
        lengths.add_(1)
        return ops.decode_attention(query, view, table, lengths, scales, 128**-0.5, workspace=workspace)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the kernels are compiled and loaded while the graph is captured
        result = step()
    lengths.zero_()
    for token in range(700):
        key.normal_(), value.normal_(), query.normal_()
        if token == 300:
            lengths[1] = 1  # a sequence ended, and another took its place
        graph.replay()
        if token % 37 == 0 or token == 699:
            expected = reference.decode_attention(query.float(), view, table, lengths, scales, 128**-0.5)
            error = (result.out.float() - expected.out).norm() / expected.out.norm()
            assert float(error) <= MAX_RELATIVE_ERROR, f"token {token}"
            torch.testing.assert_close(result.lse, expected.lse, rtol=0, atol=2e-3)


def test_a_workspace_that_is_too_small_is_refused(device: torch.device) -> None:
    case = random_case(7, device)
    with pytest.raises(InvalidRequestError, match="the workspace is too small"):
        ops.decode_attention(*case.arguments, workspace=DecodeWorkspace(device, 0, 1))
