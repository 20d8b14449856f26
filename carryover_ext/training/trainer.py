"""Trains a drafter on recordings: plain DFlash, the same at shifted anchors, or Carryover's
draft-verify-draft.

Work goes in cycles: a cycle loads ``cycle`` batches of sequences and anchors, makes their rejects with
the weights at hand (``shifted`` and ``carryover``), then takes ``reuse`` optimiser steps on each. The
state is saved between cycles only, so a killed run resumes to the same curve.

``fc`` is trained on features divided by their per-dimension RMS: the taps of small targets differ by a
factor of a hundred between dimensions. The scale is folded back into ``fc.weight`` on export, so the
checkpoint's format does not know about it.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carryover_ext.config import DrafterConfig
from carryover_ext.drafters.adapter import LORA_A, LORA_B, MARKOV_W1, MARKOV_W2
from carryover_ext.drafters.checkpoint import EMBED, HEAD
from carryover_ext.files import write_atomic
from carryover_ext.training.anchors import Batch, gather_rows, load_batch, slot_labels
from carryover_ext.training.cost import now
from carryover_ext.training.distributed import Ranks
from carryover_ext.training.draft_verify_draft import (
    Head,
    Rejects,
    block_embeddings,
    draft_and_verify,
)
from carryover_ext.training.drafting import sequence_generators, slot_rows
from carryover_ext.training.features import FeatureStore
from carryover_ext.training.forward import draft_hidden, encode_rows
from carryover_ext.training.losses import slot_weights, soft_cross_entropy
from carryover_ext.training.prefixes import stack_prefixes
from carryover_ext.training.recordings import load_saved, save_atomic
from carryover_ext.training.target_pass import Prefix, TargetPass
from carryover_ext.training.validation import Validation

OBJECTIVES = ("plain", "shifted", "carryover")


@dataclass
class TrainSettings:
    """How a run trains.

    objective: ``plain`` (anchors drawn uniformly), ``shifted`` (anchors where the drafter's own round
    would leave off;
        the control of ``carryover``), ``carryover`` (shifted anchors, the rejected rows attended to).
    steps: optimiser steps; sequences, anchors: sequences a step and anchors of each.
    lr, warmup (share of the steps), final_lr (share of lr), clip, weight_decay: AdamW with a cosine
    schedule.
    carry_lr: factor on the learning rate of the carryover embedding.
    carry_warmup: first steps of ``carryover`` in which that embedding alone is trained: at zero the rejected
        rows enter as if they were context, and the drafter would unlearn other things to undo that. Its
        control ``shifted`` rests meanwhile: both train the drafter for equally many steps. At most half of
        the steps.
    distill: share of the target's top-k distribution in the labels (the rest is the recorded token).
    l1: share of the loss that is the L1 distance to the target's top-k distribution (DSpark, arXiv
        2607.05147: 0.9, with distill 0); the rest is cross-entropy.
    gamma: decay of the slots' weights ``exp(-(k-1)/gamma)``; 0 takes DFlash's value for the block length.
    drop_segment: share of blocks that train without their carried rows, so that OFF stays good.
    cycle, reuse: see the module docstring.
    rank: trains updates of that rank to the matrices (LoRA, arXiv 2106.09685) instead of all weights, for
        ``carryover export --to adapter``; norms and a Markov head stay as they are. Wants about five times
        the learning rate. 0: all weights.
    """

    objective: str = "plain"
    steps: int = 1000
    sequences: int = 4
    anchors: int = 64
    lr: float = 1e-3
    warmup: float = 0.04
    final_lr: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.0
    carry_lr: float = 300.0
    carry_warmup: int = 48
    distill: float = 0.5
    l1: float = 0.0
    gamma: float = 0.0
    drop_segment: float = 0.1
    cycle: int = 8
    reuse: int = 1
    rank: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective={self.objective!r} must be one of {', '.join(OBJECTIVES)}")
        for name in ("steps", "sequences", "anchors", "cycle", "reuse"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr={self.lr}: must be positive and finite")
        if self.rank < 0:
            raise ValueError(f"rank={self.rank}: must be positive, or 0 to train all weights")
        if self.carry_warmup < 0:
            raise ValueError(f"carry_warmup={self.carry_warmup}: must be a number of steps, 0 for none")
        if not 0 <= self.l1 <= 1:
            raise ValueError(f"l1={self.l1}: must be a share between 0 and 1")
        if not 0 <= self.gamma < math.inf:
            raise ValueError(f"gamma={self.gamma}: must be positive, or 0 for the value of DFlash")


def check_trainable(config: DrafterConfig, names: Iterable[str]) -> None:
    """ValueError for what a checkpoint (with tensors ``names``) may have and training does not compute."""
    layers = range(config.num_hidden_layers)
    unsupported = {
        "sliding_window": any(config.layer_window(i) for i in layers),
        "layer_types (layers that differ in being causal)": len({config.layer_causal(i) for i in layers}) > 1,
        "partial_rotary_factor": config.rotary_dim != config.head_dim,
        "rope_parameters (scaled positions)": (config.rope_parameters or {}).get("rope_type", "default")
        != "default",
        "input_embedding_scale": config.input_embedding_scale not in (None, 1),
        "mask_embedding": "mask_embedding" in names,
        "markov_head_type": config.markov_rank > 0 and config.markov_head_type != "vanilla",
        "enable_confidence_head": config.enable_confidence_head,
    }
    found = [name for name, there in unsupported.items() if there]
    if found:
        raise ValueError(
            f"config: {', '.join(found)} cannot be trained yet; start from full layers, full and unscaled "
            "rotary, the target's own mask token, and no head or the vanilla Markov head"
        )


def low_rank(weights: dict[str, Tensor], rank: int, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What stays as it is, and what is trained in its place: ``B A`` beside each matrix, B zero at first, and
    the carryover embedding.

    Raises:
        ValueError: the rank saves nothing with one of the matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    frozen, trained = {}, {}
    for k, v in weights.items():
        if k == "carryover_embedding":
            trained[k] = v
            continue
        frozen[k] = v.detach()
        if v.dim() != 2 or k in (MARKOV_W1, MARKOV_W2):
            continue
        rows, columns = v.shape
        if rank * (rows + columns) >= v.numel():
            raise ValueError(
                f"rank={rank}: too many for {k} {tuple(v.shape)}; take fewer, or 0 for all weights"
            )
        a = torch.randn(rank, columns, generator=generator) / math.sqrt(columns)
        name = k.removesuffix(".weight")
        trained[name + LORA_A] = a.to(v).requires_grad_()
        trained[name + LORA_B] = torch.zeros(rows, rank).to(v).requires_grad_()
    return frozen, trained


class Trainer:
    """Holds float32 master weights by checkpoint name and takes optimiser steps.

    Args:
        parameters: initial weights (see :mod:`carryover_ext.training.initial`), trained-side scaling of
        ``fc``. An embedding and a head among them are used instead of the target's and stay as they are.
        feature_scale: ``[F]`` factor on tapped rows.
        target: needed for ``carryover`` only.
        ranks: the processes that share each batch.
    """

    def __init__(
        self,
        config: DrafterConfig,
        parameters: dict[str, Tensor],
        feature_scale: Tensor,
        head: Head,
        store: FeatureStore,
        settings: TrainSettings,
        target: TargetPass | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        if settings.sequences % self.ranks.size:
            raise ValueError(
                f"sequences={settings.sequences}: must be a multiple of the {self.ranks.size} processes"
            )
        check_trainable(config, parameters)
        if settings.objective == "carryover" and (target is None or "carryover_embedding" not in parameters):
            raise ValueError(
                "objective 'carryover' needs the target and a checkpoint with carryover_embedding"
            )
        for drawn_at, count in Counter(store.temperature(i) for i in range(len(store))).items():
            if count < settings.sequences:
                raise ValueError(
                    f"sequences={settings.sequences}: there are only {count} recordings to train on at "
                    f"temperature {drawn_at:g}; take fewer sequences a step, or record more prompts"
                )
        self.config, self.store, self.settings, self.target = config, store, settings, target
        self.head = head.of_drafter(parameters)
        self.master = {
            k: v.to(head.device, torch.float32, copy=True).requires_grad_()
            for k, v in parameters.items()
            if k not in (EMBED, HEAD)
        }
        self.frozen: dict[str, Tensor] = {}
        if settings.rank:
            self.frozen, self.master = low_rank(self.master, settings.rank, settings.seed)
        self.feature_scale = feature_scale.to(head.embed)
        slow = [v for k, v in self.master.items() if k != "carryover_embedding"]
        groups: list[dict[str, Any]] = [{"params": slow, "factor": 1.0}]
        if "carryover_embedding" in self.master:
            groups.append({"params": [self.master["carryover_embedding"]], "factor": settings.carry_lr})
        self.optimizer = torch.optim.AdamW(
            groups, lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True
        )
        self.generator = torch.Generator("cpu").manual_seed(settings.seed)
        self.step = 0
        self.order: list[int] = []

    # -- data ---
    def _next_sequences(self) -> list[int]:
        """Sequences of the next batch: shuffled epochs, similar lengths together so that padding stays
        small. The answers of a batch have one temperature."""
        if not self.order:
            group = self.settings.sequences
            shuffled = torch.randperm(len(self.store), generator=self.generator, device="cpu").tolist()
            window = group * 16
            batches: list[list[int]] = []
            for i in range(0, len(shuffled), window):
                part = sorted(shuffled[i : i + window], key=lambda j: len(self.store.recording(j).ids))
                for temperature in sorted({self.store.temperature(j) for j in part}):
                    alike = [j for j in part if self.store.temperature(j) == temperature]
                    batches += [alike[j : j + group] for j in range(0, len(alike) - group + 1, group)]
            mixed = torch.randperm(len(batches), generator=self.generator, device="cpu").tolist()
            self.order = [i for j in mixed for i in batches[j]]
        picks, self.order = self.order[: self.settings.sequences], self.order[self.settings.sequences :]
        return picks

    def _generators(self, temperature: float, share: slice) -> list[torch.Generator] | None:
        """What the next round of sampled answers draws from (:mod:`carryover_ext.training.drafting`); None
        for greedy ones."""
        if temperature == 0:
            return None
        seed = int(torch.randint(2**62, (), generator=self.generator, device="cpu"))
        return sequence_generators(seed, range(self.settings.sequences)[share], self.head.device)

    def _prefix(self, picks: list[int], batch: Batch) -> Prefix | None:
        """The target's K/V of the sequences ``picks``, where they are kept on disk."""
        parts = [part for i in picks if (part := self.store.prefix(i)) is not None]
        if len(parts) < len(picks):
            return None
        return stack_prefixes(parts, batch.ids.shape[1], self.head.embed)

    def _whole(self) -> dict[str, Tensor]:
        """The weights by checkpoint name in float32, still attached to the graph."""
        if not self.frozen:
            return self.master
        whole = {k: v for k, v in self.master.items() if not k.endswith((LORA_A, LORA_B))}
        for k, v in self.frozen.items():
            a, b = (self.master.get(k.removesuffix(".weight") + name) for name in (LORA_A, LORA_B))
            whole[k] = v if a is None or b is None else v + b @ a
        return whole

    def compute_weights(self) -> dict[str, Tensor]:
        """The weights in the target's dtype, still attached to the graph."""
        return {k: v.to(self.head.embed.dtype) for k, v in self._whole().items()}

    def _labels(self, batch: Batch, anchors: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """Head rows ``[S,N,K,k+1]``, probabilities, weights ``[S,N,K]``, labels ``[S,N,K]`` of all slots, and
        the target's distribution over the same head rows."""
        positions, inside = slot_labels(batch, anchors, self.config.verify_rows)
        inside = inside & valid[..., None]
        label = self.head.index[gather_rows(batch.ids, positions)]
        soft_ids = self.head.index[gather_rows(batch.top_ids, positions - 1)]
        soft = gather_rows(batch.top_probs, positions - 1) * (soft_ids >= 0)
        soft = soft / soft.sum(-1, keepdim=True).clamp(min=1e-6)
        alpha = self.settings.distill
        hard = (label >= 0).float()[..., None] * (1 - alpha)
        ids = torch.cat([label[..., None], soft_ids], -1).clamp(min=0)
        probs = torch.cat([hard, soft * alpha], -1)
        weights = slot_weights(self.config.verify_rows, self.settings.gamma or None, inside.device) * inside
        soft = torch.nn.functional.pad(soft, (1, 0))
        return ids, probs, weights, torch.where(inside, label, -2), soft

    # -- one step
    # ----------------------------------------------------------------------------------------------------
    def loss(self, batch: Batch, rejects: Rejects | None) -> tuple[Tensor, Tensor]:
        """This process's part of the loss at the anchors of ``batch`` (plain) or where ``rejects`` left off;
        sums over its anchors ``[3]``: estimated lengths, first-slot hits, anchors."""
        p, config = self.compute_weights(), self.config
        anchors, valid = (batch.anchors, batch.valid) if rejects is None else (rejects.anchors, rejects.valid)
        context = encode_rows(p, config, batch.features * self.feature_scale)
        embeds = block_embeddings(self.head, config, gather_rows(batch.ids, anchors))
        carried = mask = positions = None
        if rejects is not None:  # the control draws as well: both arms of a pair see the same batches
            s, n = anchors.shape
            drawn = torch.rand(s * self.ranks.size, n, generator=self.generator, device="cpu")
        if rejects is not None and rejects.features is not None:
            assert rejects.mask is not None and rejects.positions is not None
            carried = encode_rows(p, config, rejects.features * self.feature_scale, carried=True)
            keep = drawn[self.ranks.share(len(drawn))].to(anchors.device) >= self.settings.drop_segment
            mask, positions = rejects.mask & keep[..., None], rejects.positions
            if config.carry_positions == "shifted":
                positions = positions + 1
        hidden = draft_hidden(p, config, context, anchors, embeds, carried, positions, mask)
        ids, probs, weights, label, soft = self._labels(batch, anchors, valid)
        rows = weights.view(-1) > 0
        flat = slot_rows(config, hidden).reshape(-1, hidden.shape[-1])[rows]
        k = ids.shape[-1]
        latent = w2 = None
        if config.markov_rank > 0:  # teacher-forced: the bias of the recorded token before each slot
            before, _ = slot_labels(batch, anchors - 1, config.verify_rows)
            latent = p[MARKOV_W1][gather_rows(batch.ids, before).view(-1)[rows]]
            w2 = p[MARKOV_W2]
        total = weights.sum()
        self.ranks.sum([total])
        loss, best = soft_cross_entropy(
            flat,
            self.head.head,
            ids.view(-1, k)[rows],
            probs.view(-1, k)[rows],
            weights.view(-1)[rows],
            latent=latent,
            w2=w2,
            soft=soft.view(-1, k)[rows],
            l1=self.settings.l1,
            total=total,
        )
        hit = torch.zeros_like(label, dtype=torch.bool)
        hit.view(-1)[rows] = best == label.view(-1)[rows]
        lengths = 1 + hit.int().cumprod(-1).sum(-1)[valid]
        return loss, torch.stack([lengths.sum(), hit[..., 0][valid].sum(), valid.sum()]).float()

    def _set_lr(self) -> None:
        s = self.settings
        warm = max(1, round(s.warmup * s.steps))
        if self.step < warm:
            factor = (self.step + 1) / warm
        else:
            progress = (self.step - warm) / max(1, s.steps - warm)
            factor = s.final_lr + (1 - s.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = s.lr * factor * group["factor"]
        if s.objective != "plain" and self.step < min(s.carry_warmup, s.steps // 2):
            slow, *carry = self.optimizer.param_groups
            slow["lr"] = 0.0
            for group in carry:
                group["lr"] = s.lr * group["factor"]

    def run_cycle(self) -> dict[str, float]:
        """Takes up to ``cycle * reuse`` steps; returns means over them."""
        s = self.settings
        start = now(self.head.device)
        batches: list[tuple[Batch, Rejects | None]] = []
        first = torch.zeros(2, device=self.head.device)  # tokens of draft #1, anchors
        share = self.ranks.share(s.sequences)
        drawn = [self._next_sequences() for _ in range(s.cycle)]
        for picks in drawn:
            for i in picks[share]:
                self.store.read_ahead(i)
        for picks in drawn:
            batch = load_batch(self.store, picks, s.anchors, self.generator, share).to(self.head.device)
            rejects = None
            if s.objective != "plain":
                target = self.target if s.objective == "carryover" else None
                rejects = draft_and_verify(
                    self.compute_weights(),
                    self.config,
                    self.head,
                    batch,
                    target,
                    self.feature_scale,
                    self._generators(self.store.temperature(picks[0]), share),
                    self._prefix(picks[share], batch) if target else None,
                )
                accepted = rejects.accepted[batch.valid]
                first[0] += accepted.sum() + len(accepted)
                first[1] += len(accepted)
            batches.append((batch, rejects))
        made = now(self.head.device) - start
        totals = torch.zeros(3, device=self.head.device)
        taken = 0
        for _ in range(s.reuse):
            for batch, rejects in batches:
                if self.step >= s.steps:
                    break
                self._set_lr()
                loss, sums = self.loss(batch, rejects)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                seen = [loss.detach(), sums]
                self.ranks.sum([p.grad for p in self.master.values() if p.grad is not None] + seen)
                torch.nn.utils.clip_grad_norm_(list(self.master.values()), s.clip)
                self.optimizer.step()
                totals += torch.stack([seen[0], *(sums[:2] / sums[2].clamp(min=1))])
                self.step += 1
                taken += 1
        means = (totals / max(1, taken)).tolist()
        result = {
            "step": float(self.step),
            "steps": float(taken),
            "loss": means[0],
            "al": means[1],
            "slot1": means[2],
            "seconds": now(self.head.device) - start,
            "verify_seconds": made,
        }
        if s.objective != "plain":
            self.ranks.sum([first])
            result["al_first"] = float(first[0] / first[1].clamp(min=1))
        if "carryover_embedding" in self.master:
            result["carry_norm"] = float(self.master["carryover_embedding"].detach().norm())
        return result

    # -- state ---
    def save_state(self, path: Path) -> None:
        save_atomic(
            path,
            {
                "settings": asdict(self.settings),
                "master": {k: v.detach() for k, v in self.master.items()},
                "optimizer": self.optimizer.state_dict(),
                "generator": self.generator.get_state(),
                "step": self.step,
                "order": self.order,
                "sizes": self.store.sizes,
            },
        )

    def load_state(self, path: Path) -> None:
        """Continues from ``path``.

        Raises:
            ValueError: the state was written by a run with other settings.
        """
        state = load_saved(path, map_location="cpu")
        mine = asdict(self.settings)
        begun = asdict(TrainSettings()) | state["settings"]  # a setting of a later version had its default
        changed = {k: (begun[k], v) for k, v in mine.items() if begun[k] != v}
        if changed:
            raise ValueError(
                f"state: {path} was written with other settings {changed}; use a new --out folder"
            )
        with torch.no_grad():
            for k, v in self.master.items():
                v.copy_(state["master"][k])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.step = state["step"]
        self.order = [i for i in state["order"] if i < len(self.store)]
        if len(self.store.sizes) > 1 and state.get("sizes") != self.store.sizes:
            self.order = []  # recordings were added: the numbers of later stores have moved

    def export_weights(self) -> dict[str, Tensor]:
        """Weights by checkpoint name with the feature scale folded into ``fc.weight``."""
        weights = {k: v.detach().to("cpu", copy=True) for k, v in self._whole().items()}
        weights["fc.weight"] *= self.feature_scale.float().cpu()
        if self.config.own_vocabulary:
            weights |= {EMBED: self.head.embed.cpu(), HEAD: self.head.head.cpu()}
        return weights


def train(
    trainer: Trainer,
    out: Path,
    on_cycle: Callable[[dict[str, float]], None],
    on_save: Callable[[], None],
    save_every: float = 60.0,
    validation: Validation | None = None,
    validate_every: int = 200,
) -> None:
    """Runs to the end, resuming from ``out/state.pt``; the curve goes to ``out/curve.jsonl``.

    ``on_cycle`` gets the means of each cycle, ``on_save`` is called after each saved state (every
    ``save_every`` seconds). Of several processes the first one writes. ``validation`` adds to the cycle that
    reaches a multiple of ``validate_every`` steps, and to the last one, how the drafter does on held-out
    recordings.
    """
    first = trainer.ranks.first
    out.mkdir(parents=True, exist_ok=True)
    state, curve = out / "state.pt", out / "curve.jsonl"
    if state.exists():
        trainer.load_state(state)
        trainer.ranks.barrier()  # all have read the state before the first one writes
    if state.exists() and first:
        lines = curve.read_text(encoding="utf-8").splitlines() if curve.exists() else []
        kept = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may leave half a line
        write_atomic(curve, "".join(json.dumps(r) + "\n" for r in kept if r["step"] <= trainer.step))
        if trainer.step >= trainer.settings.steps:
            on_save()  # the kill may have come between the last state and its checkpoint
    saved = time.monotonic()
    while trainer.step < trainer.settings.steps:
        row = trainer.run_cycle()
        if not first:
            continue
        ended = trainer.step >= trainer.settings.steps
        if validation is not None and (ended or trainer.step % validate_every < row["steps"]):
            row |= validation(trainer.compute_weights(), trainer.config, trainer.feature_scale)
        with open(curve, "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
        on_cycle(row)
        if time.monotonic() - saved > save_every or ended:
            trainer.save_state(state)
            on_save()
            saved = time.monotonic()
