"""Decoding: prefill, then rounds of draft, verify, accept, commit and carry. Greedy or sampled, batched with
ragged acceptance.

The engine is thin: every step is a method of the target, of the drafter, or of
:mod:`carryover_ext.acceptance`, and can be called without it. Plain decoding is the same loop with no drafter
and one row a round.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from . import acceptance
from .acceptance import Sampling
from .pretrained import stop_token_ids as model_stop_token_ids
from .targets import TappedTarget


@dataclass
class Round:
    """One forward of the target. Lists have one entry a request; an inactive request has ``num_accepted`` -1
    and no tokens.

    Round 0 is the prefill: it commits the first token and is not a verification. ``num_carried``: rejected
    rows that this round hands to the next draft. ``num_drafted``: drafts that were judged. Times are host
    seconds.
    """

    index: int
    tokens: list[list[int]]
    num_accepted: list[int]
    num_drafted: list[int]
    num_carried: list[int]
    finished: list[bool]
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    commit_seconds: float = 0.0

    @property
    def committed(self) -> list[int]:
        """Tokens that this round added to each request."""
        return [len(t) for t in self.tokens]


@dataclass
class GenerateOutput:
    """What :func:`generate` returns. ``finish_reasons``: ``stop`` (a stop token, which is kept) or
    ``length``.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    prompt_lens: list[int]
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(t) for t in self.tokens)

    @property
    def num_verifications(self) -> int:
        """Verification rounds, counted for each request that took part."""
        return sum(m >= 0 for r in self.rounds[1:] for m in r.num_accepted)

    @property
    def num_drafted(self) -> int:
        return sum(n for r in self.rounds for n in r.num_drafted)

    @property
    def num_accepted(self) -> int:
        return sum(max(m, 0) for r in self.rounds[1:] for m in r.num_accepted)

    @property
    def num_carried(self) -> int:
        return sum(n for r in self.rounds for n in r.num_carried)

    @property
    def acceptance_length(self) -> float:
        """Committed tokens / verification rounds, bonus included, micro-averaged; 0 when there was no
        verification.
        """
        committed = sum(n for r in self.rounds[1:] for n in r.committed)
        return committed / self.num_verifications if self.num_verifications else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one of each request, over the time after the prefill."""
        seconds = self.seconds - self.prefill_seconds
        return (self.num_tokens - len(self.tokens)) / seconds if seconds > 0 else 0.0


def as_prompts(input_ids: Any, device: torch.device | str = "cpu") -> list[Tensor]:
    """One int64 tensor a request from ``[n]``, ``[B, n]``, a list of ids, or a list of either."""
    if isinstance(input_ids, Mapping):
        raise ValueError(
            f"input_ids is a mapping with {sorted(map(str, input_ids))}: pass its 'input_ids', unpadded"
        )
    if isinstance(input_ids, str) or (
        isinstance(input_ids, (list, tuple)) and any(isinstance(row, str) for row in input_ids)
    ):
        raise ValueError("input_ids is a text: must be token ids, as the target's tokenizer gives them")
    if isinstance(input_ids, Tensor):
        rows = [input_ids] if input_ids.dim() == 1 else list(input_ids)
    elif len(input_ids) and not hasattr(input_ids[0], "__len__"):  # Python or NumPy numbers
        rows = [torch.as_tensor(input_ids)]
    else:
        rows = [torch.as_tensor(row) for row in input_ids]
    for i, row in enumerate(rows):
        if row.dim() != 1 or row.is_floating_point() or row.numel() == 0:
            raise ValueError(
                f"input_ids[{i}] is {tuple(row.shape)} {row.dtype}: must be at least one token id, "
                "in one dimension"
            )
    return [row.to(device=device, dtype=torch.int64) for row in rows]


def generate(
    target: Any, drafter: Any, input_ids: Any, *, max_new_tokens: int | Sequence[int], **options: Any
) -> GenerateOutput:
    """Decode to the end; the options are those of :func:`stream`, which see.

    Returns tokens and finish reason of each request, the statistics of each round, and times.
    """
    start = time.perf_counter()
    output: GenerateOutput | None = None
    if options.get("stop_token_ids") is not None:
        options["stop_token_ids"] = tuple(options["stop_token_ids"])  # read twice, and may be an iterator
    for step in stream(target, drafter, input_ids, max_new_tokens=max_new_tokens, **options):
        now = time.perf_counter()
        if output is None:
            count = len(step.tokens)
            lens = [int(p.numel()) for p in as_prompts(input_ids)]
            output = GenerateOutput(
                [[] for _ in range(count)], ["length"] * count, lens, prefill_seconds=now - start
            )
        output.rounds.append(step)
        for tokens, new in zip(output.tokens, step.tokens, strict=True):
            tokens.extend(new)
        output.seconds = now - start
    if output is None:
        return GenerateOutput([], [], [])
    stops = _stops(target, options.get("stop_token_ids"))
    output.finish_reasons = ["stop" if t and t[-1] in stops else "length" for t in output.tokens]
    return output


def _stops(target: Any, given: Sequence[int] | None) -> frozenset[int]:
    if given is not None:
        return frozenset(int(i) for i in given)
    return frozenset(model_stop_token_ids(target.model if isinstance(target, TappedTarget) else target))


def _tapped(target: Any, drafter: Any) -> tuple[TappedTarget, bool]:
    """The target with the drafter's taps, and whether it was made here."""
    taps = [] if drafter is None else drafter.config.target_layer_ids
    if not isinstance(target, TappedTarget):
        return TappedTarget(target, taps), True
    if target.closed and drafter is not None:
        raise ValueError("target is a closed TappedTarget: make a new one, or pass the model itself")
    if drafter is None or target.tap_ids == taps:
        return target, False
    raise ValueError(
        f"target is tapped at {target.tap_ids}: the drafter was trained on taps {taps}; build "
        "TappedTarget with them"
    )


class _Lengths:
    """How many tokens each request may still get."""

    def __init__(self, prompts: list[Tensor], max_new_tokens: int | Sequence[int], max_length: int) -> None:
        count = len(prompts)
        wanted = list(max_new_tokens) if isinstance(max_new_tokens, Iterable) else [max_new_tokens] * count
        for n in wanted:
            if isinstance(n, bool) or not isinstance(n, Integral):
                raise ValueError(
                    f"max_new_tokens={max_new_tokens!r}: must be a whole number, or one for each request"
                )
        if len(wanted) != count:
            raise ValueError(
                f"max_new_tokens has {len(wanted)} entries: must have one for each of the {count} requests"
            )
        self.left: list[int] = []
        for i, (prompt, n) in enumerate(zip(prompts, wanted, strict=True)):
            if n < 1:
                raise ValueError(f"max_new_tokens={n} (request {i}): must be at least 1")
            room = max_length - prompt.numel()
            if room < 1:
                raise ValueError(
                    f"input_ids[{i}] has {prompt.numel()} tokens: the target takes {max_length}, "
                    "with at least one new"
                )
            self.left.append(min(int(n), room))
        self.capacity = max((p.numel() + n for p, n in zip(prompts, self.left, strict=True)), default=0)


@torch.inference_mode()
def stream(
    target: Any,
    drafter: Any,
    input_ids: Any,
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    draft_temperature: float | None = None,
    block_size: int | None = None,
    carry: bool = True,
    stop_token_ids: Sequence[int] | None = None,
    seed: int | None = None,
    page_size: int | None = None,
) -> Iterator[Round]:
    """Decode a batch and yield a :class:`Round` after the prefill and after each verification.

    Args:
        target: a Transformers causal model or a :class:`TappedTarget` with the drafter's taps.
        drafter: one of :mod:`carryover_ext.drafters`, or None for plain decoding.
        input_ids: prompts; see :func:`as_prompts`.
        max_new_tokens: one number, or one for each request; cut where the target's positions end.
        temperature, top_k, top_p, draft_temperature: see :class:`carryover_ext.acceptance.Sampling`. 0 is
            greedy. The output law is the target's.
        block_size: rows verified a round, None: as trained. Shorter is possible, longer is an error.
        carry: False leaves the temporary segment out.
        stop_token_ids: ids that end a request (kept in its tokens), None: those of the model's generation
            config.
        seed: of the random numbers, None: fresh. Drafting and judging draw from generators of their own.
        page_size: rows of a page of the drafter's cache, None: contiguous.

    Raises ValueError for bad prompts or options, and for a drafter that belongs to another target.
    """
    sampling = Sampling(temperature, top_k, top_p, draft_temperature)
    block = 1 if drafter is None else drafter.check_block(block_size)
    stops = _stops(target, stop_token_ids)
    tapped, made_here = _tapped(target, drafter)
    try:
        for name, dtype in (("target", tapped.dtype), ("drafter", drafter and drafter.dtype)):
            if drafter is not None and dtype == torch.float16:
                raise ValueError(
                    f"{name} is float16, for which there are no drafting kernels: load it with "
                    "dtype=torch.bfloat16 or torch.float32"
                )
        prompts = as_prompts(input_ids, tapped.device)
        if not prompts:
            return
        for i, prompt in enumerate(prompts):
            low, high = int(prompt.min()), int(prompt.max())
            if low < 0 or high >= tapped.vocab_size:
                raise ValueError(
                    f"input_ids[{i}] has token {low if low < 0 else high}: must be in "
                    f"0..{tapped.vocab_size - 1}"
                )
        lengths = _Lengths(prompts, max_new_tokens, tapped.max_length)
        yield from _decode(tapped, drafter, prompts, lengths, sampling, block, carry, stops, seed, page_size)
    finally:
        if made_here:
            tapped.close()


def _generators(seed: int | None, device: torch.device) -> tuple[torch.Generator, torch.Generator]:
    draws, judges = torch.Generator(device), torch.Generator(device)
    if seed is None:
        draws.seed()
        judges.seed()
    else:
        draws.manual_seed(2 * seed)
        judges.manual_seed(2 * seed + 1)
    return draws, judges


def _decode(
    target: TappedTarget,
    drafter: Any,
    prompts: list[Tensor],
    lengths: _Lengths,
    sampling: Sampling,
    block: int,
    carry: bool,
    stops: frozenset[int],
    seed: int | None,
    page_size: int | None,
) -> Iterator[Round]:
    batch, device, left = len(prompts), target.device, lengths.left
    draws, judges = _generators(seed, device)
    clock = time.perf_counter
    cache = target.new_cache(batch, lengths.capacity + block)
    started = clock()
    logits, features, row_start = target.prefill(cache, prompts)
    anchor = acceptance.choose(logits, sampling, judges)
    first = anchor.tolist()
    verified = clock()
    draft_cache = None
    if drafter is not None:
        target.bind(drafter)
        draft_cache = drafter.new_cache(batch, lengths.capacity + block, page_size)
        drafter.commit(draft_cache, features, None, row_start, row_start.diff() - 1)
    active = [True] * batch
    for i, token in enumerate(first):
        left[i] -= 1
        active[i] = left[i] > 0 and token not in stops
    yield Round(
        0,
        [[t] for t in first],
        [0] * batch,
        [0] * batch,
        [0] * batch,
        [not a for a in active],
        target_seconds=verified - started,
        commit_seconds=clock() - verified,
    )
    index = 0
    while any(active):
        index += 1
        # A request near its limit verifies fewer rows; the others go on with whole blocks.
        rows = [min(block, left[i]) if active[i] else 0 for i in range(batch)]
        width = max(rows)
        whole = all(n in (0, width) for n in rows)
        started = clock()
        tokens, drafts, judged, probs = anchor[:, None], None, None, None
        if width > 1:
            mask = torch.tensor(active, device=device)
            drafts = drafter.draft(
                draft_cache,
                anchor,
                num_drafts=width - 1,
                sampling=sampling.drafts,
                generator=draws,
                active=mask,
            )
            tokens = torch.cat([tokens, drafts.tokens], 1)
            judged, probs = drafts.tokens, drafts.probs
            if not whole:
                limit = torch.tensor(rows, device=device)[:, None] - 1
                judged = torch.where(torch.arange(width - 1, device=device) < limit, judged, -1)
        drafted = clock()
        logits, block_features = target.verify(cache, tokens)
        if judged is None:
            num_accepted = torch.zeros(batch, dtype=torch.int32, device=device)
            anchor = acceptance.choose(logits[:, 0], sampling, judges)
        else:
            num_accepted, anchor = acceptance.accept(judged, logits, probs, sampling, judges)
        # The one transfer of the round: counts, next tokens and drafts together.
        host = torch.cat([num_accepted[:, None].to(torch.int64), anchor[:, None], tokens[:, 1:]], 1).tolist()
        verified = clock()
        step = Round(index, [], [], [], [], [])
        before = list(active)
        for i, (m, token, *drafted_tokens) in enumerate(host):
            new: list[int] = []
            if active[i]:
                new = [*drafted_tokens[:m], token]
                stop = next((j for j, t in enumerate(new) if t in stops), None)
                if stop is not None:
                    new = new[: stop + 1]
                left[i] -= len(new)
                active[i] = stop is None and left[i] > 0
            step.tokens.append(new)
            # Drafts behind a stop token are not part of the answer.
            step.num_accepted.append(min(m, len(new)) if before[i] else -1)
            step.num_drafted.append(max(rows[i] - 1, 0))
            step.finished.append(not active[i])
        kept = [host[i][0] if active[i] else -1 for i in range(batch)]
        if any(active):
            if kept != [h[0] for h in host]:
                num_accepted = torch.tensor(kept, dtype=torch.int32, device=device)
            cache.advance(num_accepted + 1, [m + 1 for m in kept])
            if block_features is not None and drafter is not None:
                features, row_start = _rows(block_features, rows, width, whole)
                drafter.commit(draft_cache, features, None, row_start, num_accepted, carry=carry)
        carried = drafter is not None and carry and drafter.config.carryover
        step.num_carried = [rows[i] - 1 - kept[i] if carried and active[i] else 0 for i in range(batch)]
        step.draft_seconds, step.target_seconds = drafted - started, verified - drafted
        step.commit_seconds = clock() - verified
        yield step


def _rows(features: Tensor, rows: list[int], width: int, whole: bool) -> tuple[Tensor, Tensor]:
    """Pack ``features [B, width, F]`` to the verified rows: ``[T, F]`` and ``row_start [B+1]`` int32."""
    batch, device = features.shape[0], features.device
    if whole:
        start = torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device=device)
        return features.flatten(0, 1), start
    counts = torch.tensor(rows, device=device)
    keep = torch.arange(width, device=device) < counts[:, None]
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return features[keep], start
