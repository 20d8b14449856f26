"""Tiny targets and drafters, and a plain drafter that computes everything again each round, in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from carryover_ext.config import CarryoverConfig, DrafterConfig
from carryover_ext.drafters import DFlashDrafter, Drafts, MarkovDrafter
from carryover_ext.engine import generate
from carryover_ext.targets import TappedTarget

FAMILIES = ("llama", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma2", "gemma3")
VOCAB = 24


def engine_rounds(target: Any, drafter: Any, store: Any, count: int, carry: bool) -> int:
    """Rounds in which the engine decodes the first ``count`` recorded answers, which must be its own."""
    rounds = 0
    for i in range(count):
        row = store.recording(i)
        wanted = len(row.response_ids) - 1  # the first token is the prefill's
        room = {"max_new_tokens": len(row.response_ids) + drafter.config.verify_rows, "stop_token_ids": []}
        out = generate(target, drafter, [row.prompt_ids], carry=carry, **room)
        assert out.tokens[0][: wanted + 1] == row.response_ids
        done = 0
        for r in out.rounds[1:]:
            rounds += done < wanted
            done += r.committed[0]
    return rounds


@functools.cache
def tiny_target(family: str = "llama", vocab: int = VOCAB, layers: int = 4, hidden: int = 32) -> Any:
    """A random float32 model. Its weights are large enough that the output is not a constant."""
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    kinds = ["sliding_attention", "full_attention"] * layers
    gemma = {"head_dim": 16, "sliding_window": 6, "layer_types": kinds[:layers], "query_pre_attn_scalar": 16}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if family == "llama":
            model = LlamaForCausalLM(LlamaConfig(**common))
        elif family == "mistral":
            model = MistralForCausalLM(MistralConfig(**common, sliding_window=6))
        elif family == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**common))
        elif family == "qwen2-window":
            window = {"use_sliding_window": True, "sliding_window": 6, "layer_types": kinds[:layers]}
            model = Qwen2ForCausalLM(Qwen2Config(**common, **window))
        elif family == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**common, head_dim=16))
        elif family == "gemma2":
            caps = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}
            model = Gemma2ForCausalLM(Gemma2Config(**common, **gemma, **caps))
        else:
            model = Gemma3ForCausalLM(Gemma3TextConfig(**common, **gemma, final_logit_softcapping=3.0))
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.data.add_(0.1 * torch.randn_like(p))
            if name.endswith("bias"):
                p.data.normal_(0, 0.1)
        # One-sided attention sharpness makes the models depend on their context.
        model.requires_grad_(False)
    return model.eval().float()


def drafter_config(target: Any, **changes: Any) -> DrafterConfig:
    config = target.config
    values: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_hidden_layers,
        "target_layer_ids": [1, 2],
        "mask_token_id": 3,
        "block_size": 5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "carryover_config": CarryoverConfig(),
    }
    values.update(changes)
    return DrafterConfig(**values)


def randomize(drafter: torch.nn.Module, seed: int = 11) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in drafter.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)
        with torch.no_grad():
            if name.endswith("norm.weight") or "layernorm" in name:
                p.copy_(1 + 0.2 * noise)
            elif p.dim() == 1:
                p.copy_(noise)
            else:
                p.copy_(noise * (1.5 / math.sqrt(p.shape[1])))


def tiny_drafter(
    target: Any,
    cls: type[DFlashDrafter] = DFlashDrafter,
    seed: int = 11,
    mask_embedding: bool = False,
    **changes: Any,
) -> Any:
    drafter = cls(drafter_config(target, **changes), mask_embedding=mask_embedding)
    randomize(drafter, seed)
    if drafter.d2t is not None:
        ids = torch.randperm(target.config.vocab_size, generator=torch.Generator().manual_seed(seed))
        drafter.d2t.copy_(ids[: drafter.d2t.numel()].sort().values)
    return drafter.eval()


def prompts(*lengths: int, vocab: int = VOCAB, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def plain(target: Any, prompt: Tensor, count: int) -> tuple[list[int], float]:
    """Greedy continuation by whole forwards of the stock model, and the smallest top-2 gap on the way."""
    ids, gap = prompt[None], math.inf
    for _ in range(count):
        top = target(ids).logits[0, -1].topk(2)
        gap = min(gap, float(top.values[0] - top.values[1]))
        ids = torch.cat([ids, top.indices[None, :1]], 1)
    return ids[0, prompt.numel() :].tolist(), gap


class Steered(DFlashDrafter):
    """Records commits and drafts; then makes ``plan(request, round)`` drafts right and others wrong."""

    truth: list[list[int]]
    prompt_lens: list[int]
    plan: Any = None

    def start(self, truth: list[list[int]], prompt_lens: list[int], plan: Any = None) -> Steered:
        self.truth, self.prompt_lens, self.plan = truth, prompt_lens, plan
        self.log: list[tuple[str, Any]] = []
        self.calls = 0
        return self

    def commit(
        self,
        cache: Any,
        features: Tensor,
        positions: Any,
        row_start: Tensor,
        num_accepted: Tensor,
        carry: bool = True,
    ) -> None:
        self.log.append(("commit", (features.clone(), row_start.clone(), num_accepted.clone(), carry)))
        super().commit(cache, features, positions, row_start, num_accepted, carry)

    def draft(self, cache: Any, anchor: Tensor, **options: Any) -> Drafts:
        drafts = super().draft(cache, anchor, **options)
        state = (cache.lens.clone(), cache.segment_lens.clone())
        active = options.get("active")
        self.log.append(
            ("draft", (anchor.clone(), drafts, None if active is None else active.clone(), state))
        )
        self.calls += 1
        if self.plan is None:
            return drafts
        tokens = drafts.tokens.clone()
        for i, row in enumerate(tokens):
            done = int(cache.lens[i]) - self.prompt_lens[i] + 1
            right = self.truth[i][done : done + row.numel()]
            good = self.plan(i, self.calls)
            for j in range(row.numel()):
                token = right[j] if j < len(right) else 0
                row[j] = token if j < good else (token + 1) % self.config.vocab_size
        return Drafts(tokens)


class SteeredMarkov(Steered, MarkovDrafter):
    """The same with a Markov head."""


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _turn(x: Tensor, positions: Tensor, rot: int, theta: float) -> Tensor:
    """Rotate pairs (i, i + rot/2) of ``x [n, heads, d]`` as complex numbers."""
    half = rot // 2
    rate = torch.tensor([theta ** (-2 * i / rot) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(
        torch.ones(len(positions), half, dtype=torch.float64), positions[:, None].double() * rate
    )
    z = torch.complex(x[..., :half].contiguous(), x[..., half:rot].contiguous()) * turn[:, None]
    return torch.cat([z.real, z.imag, x[..., rot:]], -1)


def oracle_bias(drafter: MarkovDrafter, hidden: Tensor, before: list[int]) -> Tensor:
    """Bias ``[drafts, V or Vd]`` of the Markov head given the token before each slot, in float64."""
    w = {k: v.double() for k, v in drafter.markov_head.state_dict().items()}
    kind, rank = drafter.config.markov_head_type, drafter.config.markov_rank
    state = torch.zeros(rank, dtype=torch.float64)
    rows = []
    for h, token in zip(hidden, before, strict=True):
        e = w["markov_w1.weight"][token]
        if kind == "gated":
            gate = w["gate_proj.weight"] @ torch.cat([h, e]) + w["gate_proj.bias"]
            e = e / (1 + torch.exp(-gate))
        elif kind == "rnn":
            mixed = w["joint_proj.weight"] @ torch.cat([state, e, h]) + w["joint_proj.bias"]
            gate = 1 / (1 + torch.exp(-mixed[:rank]))
            state = gate * state + (1 - gate) * torch.tanh(mixed[rank : 2 * rank])
            e = torch.tanh(mixed[2 * rank :])
        rows.append(w["markov_w2.weight"] @ e)
    return torch.stack(rows)


def oracle_tables(drafter: DFlashDrafter, target: TappedTarget) -> tuple[Tensor, Tensor, float]:
    """Embedding, head (rows of all tokens) and embedding scale that a drafter works with."""
    if drafter.embed_tokens is None or drafter.lm_head is None:
        return target.embed_weight, target.head_weight, target.embed_scale
    head = drafter.lm_head.weight.detach()
    if drafter.d2t is not None:
        head = torch.zeros(drafter.config.vocab_size, head.shape[1]).index_copy_(0, drafter.d2t, head)
    return drafter.embed_tokens.weight.detach(), head, 1.0


def oracle_logits(
    drafter: DFlashDrafter,
    embed: Tensor,
    head: Tensor,
    committed: Tensor,
    rejected: Tensor | None,
    anchor: int,
    drafts: int,
    embed_scale: float = 1.0,
    before: list[int] | None = None,
) -> Tensor:
    """Draft logits ``[drafts, V or Vd]`` of one request from recorded states, without a cache, in float64.

    ``before``: the tokens before the slots, which a Markov head asks for.
    """
    rows_of_head = head.double() if drafter.d2t is None else head.double()[drafter.d2t]
    hidden = _oracle_hidden(drafter, embed, committed, rejected, anchor, drafts, embed_scale)
    logits = hidden @ rows_of_head.T
    if isinstance(drafter, MarkovDrafter):
        assert before is not None
        logits = logits + oracle_bias(drafter, hidden, before)
    return logits


def _oracle_hidden(
    drafter: DFlashDrafter,
    embed: Tensor,
    committed: Tensor,
    rejected: Tensor | None,
    anchor: int,
    drafts: int,
    embed_scale: float,
) -> Tensor:
    c, w = drafter.config, {k: v.double() for k, v in drafter.state_dict().items() if k != "d2t"}
    eps, d, nh, nkv = c.rms_norm_eps, c.head_dim, c.num_attention_heads, c.num_key_value_heads
    n = committed.shape[0]
    context = _norm(committed.double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    where, rope = list(range(n)), list(range(n))
    if rejected is not None and rejected.shape[0]:
        u = rejected.double() @ w["fc.weight"].T
        e = w["carryover_embedding"]
        before = c.carryover_config.carry_embed_at == "pre_norm"
        u = (
            _norm(u + e, w["hidden_norm.weight"], eps)
            if before
            else _norm(u, w["hidden_norm.weight"], eps) + e
        )
        context = torch.cat([context, u])
        late = 1 if c.carryover_config.carry_positions == "shifted" else 0
        where += [n + j for j in range(rejected.shape[0])]
        rope += [n + j + late for j in range(rejected.shape[0])]
    m = context.shape[0]
    first = 0 if c.sample_from_anchor else 1  # the row that predicts the token after the anchor
    size = drafts + first
    block = [n + i for i in range(size)]
    mask = w.get("mask_embedding", embed[c.mask_token_id].double() * embed_scale)
    x = torch.stack([embed[anchor].double() * embed_scale] + [mask] * (size - 1))
    for i in range(c.num_hidden_layers):
        p = f"layers.{i}."
        h = _norm(x, w[p + "input_layernorm.weight"], eps)
        a = p + "self_attn."
        q = _norm((h @ w[a + "q_proj.weight"].T).view(-1, nh, d), w[a + "q_norm.weight"], eps)
        rows = torch.cat([context, h])
        k = _norm((rows @ w[a + "k_proj.weight"].T).view(-1, nkv, d), w[a + "k_norm.weight"], eps)
        v = (rows @ w[a + "v_proj.weight"].T).view(-1, nkv, d)
        q = _turn(q, torch.tensor(block), c.rotary_dim, c.rope_theta)
        k = _turn(k, torch.tensor(rope + block), c.rotary_dim, c.rope_theta)
        out = torch.zeros(size, nh, d, dtype=torch.float64)
        for t in range(size):
            seen = []
            for s, position in enumerate(where + block):
                ok = not (c.layer_window(i) and block[t] - position >= c.layer_window(i))
                if c.layer_causal(i) and s >= m and s - m > t:
                    ok = False
                if ok:
                    seen.append(s)
            for head_index in range(nh):
                g = head_index // (nh // nkv)
                score = torch.softmax(k[seen, g] @ q[t, head_index] / math.sqrt(d), 0)
                out[t, head_index] = score @ v[seen, g]
        x = x + out.reshape(size, -1) @ w[a + "o_proj.weight"].T
        h = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        x = (
            x
            + (gate * torch.sigmoid(gate) * (h @ w[p + "mlp.up_proj.weight"].T))
            @ w[p + "mlp.down_proj.weight"].T
        )
    return _norm(x[first:], w["norm.weight"], eps)


def replay(drafter: Steered, target: TappedTarget) -> tuple[int, int, int]:
    """Compare every recorded draft with the oracle: (tokens equal, tokens compared, rows carried)."""
    committed: list[list[Tensor]] = []
    rejected: list[Tensor] = []
    equal = total = carried = certain = 0
    for kind, entry in drafter.log:
        if kind == "commit":
            features, row_start, num_accepted, carry = entry
            batch = num_accepted.numel()
            if not committed:
                committed = [[] for _ in range(batch)]
            rejected = [torch.zeros(0, features.shape[1])] * batch
            for i, m in enumerate(num_accepted.tolist()):
                rows = features[row_start[i] : row_start[i + 1]]
                if m >= 0:
                    committed[i].append(rows[: m + 1])
                    if carry and drafter.config.carryover:
                        rejected[i] = rows[m + 1 :]
            continue
        anchor, drafts, active, (lens, segment_lens) = entry
        for i in range(anchor.numel()):
            if active is not None and not active[i]:
                continue
            states = torch.cat(committed[i])
            assert int(lens[i]) == states.shape[0]
            assert int(segment_lens[i]) == rejected[i].shape[0]
            carried += rejected[i].shape[0]
            embed, head, scale = oracle_tables(drafter, target)
            logits = oracle_logits(
                drafter,
                embed,
                head,
                states,
                rejected[i],
                int(anchor[i]),
                drafts.tokens.shape[1],
                scale,
                [int(anchor[i]), *drafts.tokens[i, :-1].tolist()],
            )
            best = logits.topk(2, -1)
            expected = best.indices[:, 0] if drafter.d2t is None else drafter.d2t[best.indices[:, 0]]
            clear = (best.values[:, 0] - best.values[:, 1]) > 1e-4
            equal += int(((drafts.tokens[i] == expected) | ~clear).sum())
            total += expected.numel()
            certain += int(clear.sum())
    assert certain > 0.9 * total
    return equal, total, carried
