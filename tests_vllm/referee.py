"""Looks over the shoulder of a proposer in the running engine: what it drafts must be what this package's own
drafter drafts from the same target states, request by request and round by round.

The reference remembers nothing of the engine's caches. It knows the target state of every token it has seen,
keyed by the tokens up to it, and builds each round's context from those: whatever the engine loses, mixes up
between requests, or carries when it must not, shows as other tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from carryover_ext.drafters import load_drafter
from carryover_ext.layers import rms_norm

TIE = 1e-4  # of the largest logit: what another order of summation may decide in float32


@dataclass
class Report:
    """Counts over all requests and rounds. ``drafted``: tokens compared; ``equal``: of those, equal to the
    reference; ``ties``: unequal, the two logits within rounding; ``without``: equal to a reference that
    carries nothing, in rounds that carried; ``carried_tokens``: tokens of those rounds; ``rejected``,
    ``carried``, ``rows``: rounds by such rows; ``starts``: prefill steps by their first row's position."""

    rounds: int = 0
    drafted: int = 0
    equal: int = 0
    ties: int = 0
    without: int = 0
    carried_tokens: int = 0
    rejected: Counter = field(default_factory=Counter)
    carried: Counter = field(default_factory=Counter)
    rows: Counter = field(default_factory=Counter)
    starts: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def check(self, drafts: int, segment: bool = True) -> None:
        """All drafts equal the reference, and the check had something to say: every number of rejected rows
        came up, and (``segment``) the carried rows change what the reference drafts."""
        assert not self.faults, self.faults[:5]
        assert self.equal + self.ties == self.drafted > 0
        assert self.ties <= self.drafted // 100
        assert all(self.rejected[r] for r in range(drafts + 1)), self.rejected
        if segment:
            assert all(self.carried[r] for r in range(1, drafts + 1)), self.carried
            assert self.without < 0.98 * self.carried_tokens, (self.without, self.carried_tokens)


def target_tensors(folder: Path) -> tuple[Tensor, Tensor]:
    """Embedding and head of a target's folder, float32."""
    tensors = load_file(folder / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"].float()
    return embed, tensors.get("lm_head.weight", embed).float()


class Referee:
    """Args:
    folder: the drafter in this package's layout. target: the target's folder.
    limit: the engine's max_model_len.
    carry: whether the engine carries (False: the reference leaves the segment out).
    truth: a request's prompt -> its whole token sequence; drafts are then overwritten by a random number of
        right tokens, so that acceptance varies.
    window: as in ``segment.carried_rows``.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        *,
        limit: int,
        carry: bool = True,
        truth: Callable[[Sequence[int]], Sequence[int] | None] | None = None,
        window: int = 0,
        seed: int = 0,
    ) -> None:
        self.drafter = load_drafter(folder, torch.float32)
        self.drafter.bind(*target_tensors(target))
        self.limit, self.carry, self.truth, self.window = limit, carry, truth, window
        self.random = random.Random(seed)
        self.states: dict[tuple[int, ...], Tensor] = {}
        self.report = Report()

    def judge(
        self,
        request: str,
        prompt: Sequence[int],
        known: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        states: Tensor,
        rejected: int,
        anchor: int,
        drafts: Tensor,
    ) -> Tensor:
        """One request of one round: its rows (accepted, then ``rejected``), the next token, and the engine's
        drafts ``[K]``, which come back, overwritten where ``truth`` says so. ``known``: the request's tokens
        so far."""
        report, accepted = self.report, tokens.shape[0] - rejected
        first, count = int(positions[0]), int(positions[accepted - 1]) + 1
        sequence = [*known[:first], *tokens[:accepted].tolist()]
        assert len(sequence) == count, (request, len(sequence), count)
        for i in range(accepted):
            self.states[tuple(sequence[: first + i + 1])] = states[i].clone()
        context = [self.states.get(tuple(sequence[: i + 1])) for i in range(count)]
        if any(state is None for state in context):
            report.faults.append(f"{request}: rows from {first} on came before those in front of them")
            return drafts
        block = len(drafts) + self.drafter.config.first_slot
        fit = min(len(drafts), self.limit - count - self.drafter.config.first_slot)
        carried = min(rejected, max(self.limit - count - block, 0)) if self.carry else 0
        if self.window and count + block + carried > self.window:
            carried = 0
        report.rounds += 1
        report.rejected[rejected] += 1
        report.carried[carried] += 1
        report.rows[tokens.shape[0]] += 1
        if not rejected and first < len(prompt):
            report.starts[first] += 1
        if fit > 0:
            rows = [*context, *states[accepted : accepted + carried]]
            expected = self._draft(rows, count, anchor, fit)
            got = drafts[:fit].tolist()
            self._compare(request, rows, count, anchor, expected, got)
            if carried:
                report.carried_tokens += fit
                plain = self._draft(rows[:count], count, anchor, fit)
                report.without += sum(a == b for a, b in zip(plain, got, strict=True))
        true = self.truth(prompt) if self.truth else None
        if true is not None and list(true[: count + 1]) == [*sequence, anchor]:
            right = true[count + 1 : count + 1 + self.random.randint(0, len(drafts))]
            drafts = drafts.clone()
            drafts[: len(right)] = torch.tensor(right, dtype=drafts.dtype)
        return drafts

    def _cache(self, rows: Sequence[Tensor], count: int):
        cache = self.drafter.new_cache(1, len(rows) + 2 * self.drafter.config.block_size)
        ends = torch.tensor([0, len(rows)], dtype=torch.int32)
        accepted = torch.tensor([count - 1], dtype=torch.int32)
        self.drafter.commit(cache, torch.stack(list(rows)).float(), None, ends, accepted)
        assert int(cache.segment_lens) == len(rows) - count
        return cache

    @torch.inference_mode()
    def _draft(self, rows: Sequence[Tensor], count: int, anchor: int, number: int) -> list[int]:
        out = self.drafter.draft(self._cache(rows, count), torch.tensor([anchor]), num_drafts=number)
        return out.tokens[0].tolist()

    @torch.inference_mode()
    def _logits(self, rows: Sequence[Tensor], count: int, before: Sequence[int], number: int) -> Tensor:
        """Logits of the slots, the Markov bias included: ``before[k]`` is the token in front of slot k."""
        drafter = self.drafter
        first = drafter.config.first_slot
        x = drafter._block(
            cache := self._cache(rows, count), cache.lens, torch.tensor([before[0]]), number + first
        )
        hidden = rms_norm(x[:, first:], drafter.norm.weight, drafter.config.rms_norm_eps)[0]
        logits = drafter._logits(hidden)
        if drafter.config.markov_rank:
            logits = logits + drafter.markov_head.bias(torch.tensor(list(before)), hidden, None)[0]
        return logits

    def _compare(
        self,
        request: str,
        rows: Sequence[Tensor],
        count: int,
        anchor: int,
        expected: list[int],
        got: list[int],
    ) -> None:
        report = self.report
        report.drafted += len(got)
        report.equal += sum(a == b for a, b in zip(expected, got, strict=True))
        wrong = [k for k, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
        if not wrong:
            return
        logits = self._logits(rows, count, [anchor, *got[:-1]], len(got))
        columns = {} if self.drafter.d2t is None else {int(t): c for c, t in enumerate(self.drafter.d2t)}
        for k in wrong:
            row = logits[k]
            column = columns.get(got[k]) if columns else got[k]
            gap = float("inf") if column is None else float(row.max() - row[column])
            if gap <= TIE * float(row.abs().max()):
                report.ties += 1
            else:
                report.faults.append(
                    f"{request} at position {count}, slot {k}: {got[k]} instead of {expected[k]}, "
                    f"{gap:.3g} apart, {len(rows) - count} rows carried"
                )
