"""bench/peers.py: which peers are timed, and the pages that they are given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from compare import assert_equal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import peers

from carryover_ext import ops


def test_a_peer_that_differs_or_fails_is_left_out_and_named(capsys) -> None:
    one = torch.ones(3)
    assert list(peers.checked("same", lambda: (one.sum, lambda: peers.close(one, one)))) == ["same"]
    assert peers.checked("other", lambda: (one.sum, lambda: peers.close(one, 2 * one))) == {}

    def broken():
        raise ImportError("no such kernel\nand more")

    assert peers.checked("absent", broken) == {}
    said = capsys.readouterr().err
    assert (
        "other: left out (AssertionError" in said and "absent: left out (ImportError: no such kernel)" in said
    )


@pytest.mark.parametrize("carried", [0, 3])
@pytest.mark.parametrize("context", [1, 31, 64])
def test_pages_hold_context_carried_rows_and_block(context: int, carried: int) -> None:
    """Attention over these pages alone is segment_attention's result."""
    batch, rows, heads, d = 2, 4, 2, 32
    k, v = (tuple(torch.randn(batch, n, heads, d) for n in (context, rows - 1, rows)) for _ in "kv")
    q = torch.randn(batch, rows, 2 * heads, d)
    p = peers.paged((k, v), carried)
    k_cache, v_cache = (torch.full(p.shape, float("nan")) for _ in "kv")
    for part in (p.old, p.new):
        for cache, values in zip((k_cache, v_cache), part[:2], strict=True):
            cache.flatten(0, 1)[part[2]] = values
    assert (~k_cache[..., 0, 0].isnan()).sum() == batch * p.total
    lens = [torch.full((batch,), n, dtype=torch.int32) for n in (context, carried)]
    expected = ops.segment_attention(q, k[0], v[0], lens[0], k[1], v[1], lens[1], k[2], v[2])
    before = torch.full((batch,), p.total - rows, dtype=torch.int32)
    args = (q, k_cache, v_cache, before, None, None, None, k[2], v[2], p.table)
    torch.testing.assert_close(ops.segment_attention(*args), expected, rtol=1e-5, atol=1e-5)
    block = k_cache.flatten(0, 1)[p.new[2]].view(batch, -1, heads, d)[:, carried:]
    assert_equal(block, k[2])


@pytest.mark.skipif(peers.installed("vllm") or peers.installed("flashinfer"), reason="a peer is installed")
def test_without_the_packages_there_are_no_peers() -> None:
    tokens, logits = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 3, 5)
    assert peers.acceptance((tokens, logits, None, None, 0.0), ops.accept(tokens, logits)) == {}
