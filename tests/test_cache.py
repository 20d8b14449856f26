"""The committed context and the temporary segment."""

from __future__ import annotations

import pytest
import torch
from tiny import prompts, tiny_drafter, tiny_target
from torch import Tensor

from carryover_ext.cache import DrafterCache


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(
    batch: int = 3, capacity: int = 12, page: int | None = None, table: Tensor | None = None
) -> DrafterCache:
    return DrafterCache(
        layers=2,
        batch=batch,
        capacity=capacity,
        kv_heads=2,
        head_dim=4,
        segment_rows=3,
        cos_sin=torch.zeros(64, 4),
        dtype=torch.float32,
        page_size=page,
        block_table=table,
    )


@pytest.mark.parametrize("page", [None, 1, 3, 5, 12, 20])
def test_slots_agree_with_a_plain_loop(page: int | None) -> None:
    cache = make(page=page)
    if page is not None:
        cache.block_table = cache.block_table.flip(0, 1).contiguous()
    cache.lens.copy_(int32(0, 4, 9))
    row_start = int32(0, 3, 3, 8)
    positions = cache.positions(row_start, 8)
    assert positions.tolist() == [0, 1, 2, 9, 10, 11, 12, 13]
    slots = cache.slots(positions, row_start)
    for row, (request, position) in enumerate(zip([0, 0, 0, 2, 2, 2, 2, 2], positions.tolist(), strict=True)):
        if position >= cache.capacity:
            expected = -1
        elif page is None:
            expected = request * cache.capacity + position
        else:
            expected = int(cache.block_table[request, position // page]) * page + position % page
        assert int(slots[row]) == expected
    assert cache.slots(int32(-1, 5), int32(0, 0, 0, 2)).tolist()[0] == -1


@pytest.mark.parametrize("page", [None, 4])
def test_shapes_and_capacity(page: int | None) -> None:
    cache = make(capacity=10, page=page)
    assert cache.capacity == (10 if page is None else 12)
    assert cache.k.shape == ((2, 3, 10, 2, 4) if page is None else (2, 9, 4, 2, 4))
    assert cache.k_segment.shape == (2, 3, 3, 2, 4) and cache.segment_rows == 3 and cache.batch == 3


def test_empty_batch() -> None:
    cache = make(batch=0)
    assert cache.slots(torch.zeros(0, dtype=torch.int32), int32(0)).numel() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": -1}, "batch=-1"),
        ({"capacity": 0}, "capacity=0"),
        ({"page": 0}, "page_size=0"),
        ({"table": int32(0, 1)}, "page_size is None"),
        ({"page": 4, "table": torch.zeros(3, 3)}, "must be"),
        ({"page": 4, "table": torch.zeros(2, 3, dtype=torch.int32)}, "must be"),
    ],
)
def test_bad_construction(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_reset() -> None:
    cache = make()
    cache.lens.fill_(4)
    cache.segment_lens.fill_(2)
    cache.reset([1])
    assert cache.lens.tolist() == [4, 0, 4] and cache.segment_lens.tolist() == [2, 0, 2]
    cache.drop_segment()
    assert cache.lens.tolist() == [4, 0, 4] and cache.segment_lens.tolist() == [0, 0, 0]
    cache.reset()
    assert cache.lens.tolist() == [0, 0, 0]
    for bad in ([3], [-1]):
        with pytest.raises(IndexError, match=r"must be in 0\.\.2"):
            cache.reset(bad)


# -- rules of the segment, on a drafter ------------------------------------------------------------


def setup(batch: int = 2, page: int | None = None, **changes):
    target = tiny_target()
    drafter = tiny_drafter(target, **changes)
    embed = target.get_input_embeddings().weight
    drafter.bind(embed, target.lm_head.weight)
    cache = drafter.new_cache(batch, 40, page)
    return drafter, cache


def features(*rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    return torch.randn(sum(rows), 64, generator=generator), start


@pytest.mark.parametrize("page", [None, 4])
def test_prefill_leaves_the_segment_empty(page: int | None) -> None:
    drafter, cache = setup(page=page)
    drafter.commit(cache, *insert(features(7, 3)), int32(6, 2))
    assert cache.lens.tolist() == [7, 3] and cache.segment_lens.tolist() == [0, 0]


def insert(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, None, Tensor]:
    return pair[0], None, pair[1]


@pytest.mark.parametrize("m", [-1, 0, 1, 2, 3, 4])
@pytest.mark.parametrize("carry", [True, False])
def test_segment_length_follows_the_rejections(m: int, carry: bool) -> None:
    drafter, cache = setup()
    drafter.commit(cache, *insert(features(4, 4)), int32(3, 3))
    drafter.commit(cache, *insert(features(5, 5, seed=1)), int32(0, m), carry=carry)
    assert cache.lens.tolist() == [5, 4 + m + 1]
    assert cache.segment_lens.tolist() == ([4, 0 if m < 0 else 4 - m] if carry else [0, 0])


def test_segment_is_replaced_whole() -> None:
    drafter, cache = setup(batch=1)
    drafter.commit(cache, *insert(features(4)), int32(3))
    for m, expected in ((0, 4), (3, 1), (4, 0), (2, 2)):
        drafter.commit(cache, *insert(features(5, seed=m)), int32(m))
        assert cache.segment_lens.tolist() == [expected]
    # The rows of the last commit, and nothing of the earlier ones, decide the drafts.
    other, fresh = setup(batch=1)
    other.commit(fresh, *insert(features(4)), int32(3))
    for m in (0, 3, 4, 2):
        other.commit(fresh, *insert(features(5, seed=m)), int32(m), carry=m == 2)
    assert torch.equal(cache.k_segment[:, 0, :2], fresh.k_segment[:, 0, :2])
    anchor = torch.tensor([1])
    options = {"temperature": 1.0}
    one = drafter.draft(cache, anchor, generator=torch.Generator().manual_seed(1), **options)
    two = other.draft(fresh, anchor, generator=torch.Generator().manual_seed(1), **options)
    assert torch.equal(one.probs, two.probs)


@pytest.mark.parametrize("page", [None, 4])
def test_other_requests_and_stale_rows_are_never_seen(page: int | None) -> None:
    drafter, cache = setup(batch=3, page=page)
    drafter.commit(cache, *insert(features(6, 6, 6)), int32(5, 5, 5))
    drafter.commit(cache, *insert(features(5, 5, 5, seed=2)), int32(2, 1, 4))
    anchor = torch.tensor([1, 2, 4])
    before = drafter.draft(cache, anchor, temperature=1.0).probs
    # Poison everything that request 1 must not see: its own stale rows and all of its neighbours.
    keep = torch.zeros(cache.k.shape[1] * cache.k.shape[2], dtype=torch.bool)
    start = int32(0, 0, int(cache.lens[1]), int(cache.lens[1]))
    keep[cache.slots(torch.arange(int(cache.lens[1]), dtype=torch.int32), start)] = True
    for x in (cache.k, cache.v):
        x.flatten(1, 2)[:, ~keep] = float("nan")
    for x in (cache.k_segment, cache.v_segment):
        x[:, 0] = x[:, 2] = float("nan")
        x[:, 1, int(cache.segment_lens[1]) :] = float("nan")
    after = drafter.draft(cache, anchor, temperature=0.0, active=torch.tensor([False, True, False]))
    assert torch.equal(after.tokens[1], before[1].argmax(-1))


@pytest.mark.parametrize("page", [None, 4])
def test_a_reused_slot_is_like_a_fresh_one(page: int | None) -> None:
    drafter, cache = setup(page=page)
    drafter.commit(cache, *insert(features(9, 5)), int32(8, 4))
    drafter.commit(cache, *insert(features(5, 5, seed=1)), int32(1, 0))
    cache.reset([0])
    drafter.commit(cache, *insert(features(4, 0, seed=3)), int32(3, -1))
    assert cache.lens.tolist() == [4, 6] and cache.segment_lens.tolist() == [0, 0]
    other, fresh = setup(page=page)
    other.commit(fresh, *insert(features(4, 0, seed=3)), int32(3, -1))
    anchor = torch.tensor([3, 3])
    got, expected = (
        d.draft(c, anchor, temperature=1.0).probs[0] for d, c in ((drafter, cache), (other, fresh))
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("page", [1, 3, 8])
def test_paged_equals_contiguous(page: int) -> None:
    drafter, cache = setup()
    pages = -(-40 // page)
    table = torch.randperm(2 * pages).to(torch.int32).view(2, pages)
    paged = drafter.new_cache(2, 40, page, table)
    for target in (cache, paged):
        drafter.commit(target, *insert(features(9, 4)), int32(8, 3))
        drafter.commit(target, *insert(features(5, 5, seed=1)), int32(1, 3))
    anchor = torch.tensor([3, 5])
    one, two = (drafter.draft(c, anchor, temperature=1.0).probs for c in (cache, paged))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_chunks_of_a_prefill_are_the_prefill() -> None:
    drafter, cache = setup(batch=1)
    rows, start = features(10)
    drafter.commit(cache, rows, None, start, int32(9))
    parts = drafter.new_cache(1, 40)
    drafter.commit(parts, rows[:6], None, int32(0, 6), int32(5))
    drafter.commit(parts, rows[6:], None, int32(0, 4), int32(3))
    assert parts.lens.tolist() == [10] and parts.segment_lens.tolist() == [0]
    torch.testing.assert_close(cache.k[:, 0, :10], parts.k[:, 0, :10], rtol=1e-5, atol=1e-5)


def test_full_cache_is_an_error() -> None:
    drafter, _ = setup()
    cache = drafter.new_cache(1, 8)
    drafter.commit(cache, *insert(features(8)), int32(7))
    with pytest.raises(ValueError, match="commit 9 rows: the cache has capacity=8"):
        drafter.commit(cache, *insert(features(5)), int32(0))


def test_rejected_rows_past_the_capacity_are_carried() -> None:
    drafter, _ = setup()
    cache = drafter.new_cache(1, 9)
    drafter.commit(cache, *insert(features(7)), int32(6))
    drafter.commit(cache, *insert(features(5, seed=1)), int32(0))
    assert cache.lens.tolist() == [8] and cache.segment_lens.tolist() == [4]


def test_off_is_bit_equal_to_the_baseline() -> None:
    target = tiny_target()
    on = tiny_drafter(target)
    baseline = tiny_drafter(target, carryover_config=None)
    baseline.load_state_dict({k: v for k, v in on.state_dict().items() if k != "carryover_embedding"})
    for drafter in (on, baseline):
        drafter.bind(target.get_input_embeddings().weight, target.lm_head.weight)
    caches = [d.new_cache(2, 40) for d in (on, baseline)]
    for drafter, cache in zip((on, baseline), caches, strict=True):
        drafter.commit(cache, *insert(features(9, 4)), int32(8, 3))
        drafter.commit(cache, *insert(features(5, 5, seed=1)), int32(1, 3), carry=False)
    assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)
    one, two = (
        d.draft(c, torch.tensor([1, 2]), temperature=1.0).probs
        for d, c in zip((on, baseline), caches, strict=True)
    )
    assert torch.equal(one, two)
    assert len(prompts(2)) == 1


def test_committed_rows_are_the_same_bits_with_carry() -> None:
    drafter, cache = setup()
    off = drafter.new_cache(2, 40)
    for c, carry in ((cache, True), (off, False)):
        drafter.commit(c, *insert(features(9, 4)), int32(8, 3), carry=carry)
        drafter.commit(c, *insert(features(5, 5, seed=1)), int32(1, 3), carry=carry)
    assert torch.equal(cache.k, off.k) and torch.equal(cache.v, off.v)
    assert cache.segment_lens.tolist() == [3, 1] and off.segment_lens.tolist() == [0, 0]
