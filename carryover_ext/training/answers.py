"""The target answers prompts in large batches, and leaves behind what training needs of the answers.

A decoding step computes the tapped states and the next-token distribution of every row anyway. Kept, they
save the forward pass over whole recordings that :func:`carryover_ext.training.features.build_features`
makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carryover_ext.acceptance import Sampling, choose
from carryover_ext.slot_cache import SlotCache
from carryover_ext.targets import TappedTarget
from carryover_ext.training.features import ShardFeatures, top_tokens
from carryover_ext.training.prefixes import shard_prefixes

PREFILL_TOKENS = 4096  # of one forward, padding included


@dataclass
class _Answer:
    """One answer of n tokens to a prompt of p: taps ``[p + n, F]``; of the rows from the prompt's last one
    on, top_ids and top_probs ``[n + 1, k]`` and next_probs ``[n + 1]``; kv ``[p + n, layers, 2, nkv, d]``
    (:mod:`carryover_ext.training.prefixes`)."""

    tokens: list[int]
    finish: str
    taps: Tensor | None
    top_ids: Tensor
    top_probs: Tensor
    next_probs: Tensor
    kv: Tensor | None


class EngineBackend:
    """Answers of a target of this package: ``batch`` prompts of similar length side by side; finished ones
    are left out when they are a quarter of the batch.

    Args:
        target: with taps, :attr:`features` holds what :mod:`carryover_ext.training.features` keeps of the
            prompts and answers of the last call.
        temperature: 0 is greedy.
        stop_token_ids: end an answer, and are part of it.
        seed: what is drawn depends on it, on the place of the first prompt of a call and on ``batch``.
        top_k: most probable next tokens that are kept.
        keep_kv: :attr:`prefixes` holds what :mod:`carryover_ext.training.prefixes` keeps of the last call.
    """

    def __init__(
        self,
        target: TappedTarget,
        *,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        batch: int,
        seed: int,
        top_k: int = 8,
        keep_kv: bool = False,
    ) -> None:
        self.target, self.batch, self.seed, self.top_k = target, batch, seed, top_k
        self.max_new_tokens, self.sampling = max_new_tokens, Sampling(temperature)
        self.stops = frozenset(stop_token_ids)
        self.kv_layers = max(target.tap_ids) + 1 if keep_kv else 0
        self.features: dict[str, Tensor] | None = None  # of the last call
        self.prefixes: dict[str, Tensor] | None = None

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[list[int]], first: int) -> list[tuple[list[int], str]]:
        longest = max(map(len, prompts))
        if longest + self.max_new_tokens > self.target.max_length:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens}: a prompt has {longest} tokens and the target was "
                f"made for {self.target.max_length} positions; ask for fewer, or leave long prompts out"
            )
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers: dict[int, _Answer] = {}
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            generator = torch.Generator(self.target.device).manual_seed(self.seed + first + start)
            answers |= zip(part, self._answer([prompts[i] for i in part], generator), strict=True)
        found = [answers[i] for i in range(len(prompts))]
        self.features = self._features(prompts, found) if self.target.tap_ids else None
        if self.kv_layers:
            self.prefixes = shard_prefixes(
                [[*p, *a.tokens] for p, a in zip(prompts, found, strict=True)],
                [a.kv for a in found if a.kv is not None],
            )
        return [(a.tokens, a.finish) for a in found]

    def _prefill(self, prompts: list[Tensor]) -> tuple[SlotCache, Tensor, list[Tensor]]:
        """Cache, logits ``[B, V]`` of the last rows and taps of each prompt (none without taps)."""
        lengths = [len(p) for p in prompts]
        cache = self.target.new_cache(len(prompts), lengths[-1] + self.max_new_tokens + 1)
        logits, taps, start = [], list[Tensor](), 0
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and (end + 1 - start) * lengths[end] <= PREFILL_TOKENS:
                end += 1
            part = self.target.new_cache(end - start, lengths[end - 1])
            last, packed, _ = self.target.prefill(part, prompts[start:end])
            cache.place(start, part)
            logits.append(last)
            if packed is not None:
                taps += packed.split(lengths[start:end])
            start = end
        return cache, torch.cat(logits), taps

    def _answer(self, ids: list[list[int]], generator: torch.Generator) -> list[_Answer]:
        """Answers to prompts in rising order of length."""
        target, most, k, device = self.target, self.max_new_tokens, self.top_k, self.target.device
        prompts = [torch.tensor(p, device=device) for p in ids]
        size = len(prompts)
        cache, logits, prompt_taps = self._prefill(prompts)
        width = target.hidden_size * len(target.tap_ids)
        taps = torch.empty(size, most, width, dtype=target.dtype)
        top_ids = torch.zeros(size, most + 1, k, dtype=torch.int32)
        top_probs, next_probs = torch.zeros(size, most + 1, k), torch.zeros(size, most + 1)
        tokens: list[list[int]] = [[] for _ in ids]
        kv: list[Tensor | None] = [None] * size
        live = torch.arange(size)  # the request of each row
        ended = torch.zeros(size, dtype=torch.bool)
        for t in range(most + 1):
            best, best_probs, norm = top_tokens(logits, k)
            top_ids[live, t], top_probs[live, t] = best.int().cpu(), best_probs.cpu()
            if 4 * int(ended.sum()) >= len(live):
                keep = (~ended).nonzero()[:, 0]
                for row in ended.nonzero()[:, 0].tolist() if self.kv_layers else ():
                    request = int(live[row])
                    kv[request] = cache.rows(row, len(ids[request]) + len(tokens[request]), self.kv_layers)
                if len(keep) == 0:
                    break
                kept = keep.to(device)
                cache.select(kept)
                live, ended, logits, norm = live[keep], ended[keep], logits[kept], norm[kept]
            if t == most:
                break
            chosen = choose(logits, self.sampling, generator)
            likely = (logits.gather(1, chosen[:, None]).float() - norm)[:, 0].exp().cpu()
            next_probs[live, t] = torch.where(ended, 0.0, likely)
            for row, (request, token) in enumerate(zip(live.tolist(), chosen.tolist(), strict=True)):
                if not ended[row]:
                    tokens[request].append(token)
                    ended[row] = token in self.stops or t + 1 == most
            rows = target.forward(cache, chosen[:, None])
            cache.advance(torch.ones_like(chosen), [1] * len(chosen))
            features = target.features()
            if features is not None:
                taps[live, t] = features[:, 0].cpu()
            logits = target.logits(rows[:, 0])
        answers = []
        for i, own in enumerate(tokens):
            n = len(own)
            whole = torch.cat([prompt_taps[i].cpu(), taps[i, :n]]) if prompt_taps else None
            finish = "stop" if own and own[-1] in self.stops else "length"
            best, likely, following = (x[i, : n + 1] for x in (top_ids, top_probs, next_probs))
            answers.append(_Answer(own, finish, whole, best, likely, following, kv[i]))
        return answers

    def _features(self, prompts: Sequence[list[int]], answers: list[_Answer]) -> dict[str, Tensor]:
        """The file of a shard, see :mod:`carryover_ext.training.features`."""
        width = self.target.hidden_size * len(self.target.tap_ids)
        ids = [[*p, *a.tokens] for p, a in zip(prompts, answers, strict=True)]
        shard = ShardFeatures(ids, width, self.target.dtype, self.top_k)
        for i, answer in enumerate(answers):
            assert answer.taps is not None
            shard.put(i, answer.taps, answer.top_ids, answer.top_probs, answer.next_probs)
        return shard.tensors
