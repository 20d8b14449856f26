"""The DFlash drafter (arXiv 2602.06036) with the temporary segment of Carryover Drafting (arXiv 2609.14717).

The block is ``[anchor, mask x (b-1)]``; slot j predicts its own position (in the anchor-first layout the one
after it). Its rows attend, in every layer, to
the committed context, to the rows that the last verification rejected, and to the block. Context and rejected
rows come from tapped target states (:func:`carryover_ext.ops.commit_and_carry`); embedding and head are the
target's and are bound, not stored, unless the drafter's hidden size is another: then it has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..acceptance import Sampling, probabilities, sample
from ..cache import DrafterCache
from ..config import DrafterConfig
from ..layers import DraftLayer, RMSNorm, block_forward, rms_norm, rotary_table
from ..packing import PackedWeight, content, fast_dtype, fingerprint, linear, pack
from .checkpoint import check_draft_vocabulary, check_target, check_tensors, read_tensors, write_tensors


@dataclass
class Drafts:
    """A drafted block: ``tokens [B, K]`` int64 target ids; ``probs [B, K, V]`` float32, the law they were
    drawn from (None: greedy).
    """

    tokens: Tensor
    probs: Tensor | None = None


@dataclass
class _Packed:
    """Fused weights for decoding: see :meth:`DFlashDrafter.pack`."""

    key: tuple[object, ...]
    kv: tuple[Any, ...]
    layers: list[tuple[Tensor, ...]]
    fast: list[tuple[Any, ...]]  # the same, with matrices packed where that pays


class DFlashDrafter(nn.Module):
    """Parameters carry the tensor names of the z-lab checkpoints; ``carryover_embedding [H]`` exists when the
    config enables it, ``embed_tokens.weight [V, H]`` and ``lm_head.weight [Vd, H]`` when the hidden size is
    not the target's.

    Args:
        config: shapes and switches.
        mask_embedding: whether the checkpoint has a learned ``mask_embedding [H]`` instead of the embedding's
            row of the mask token.
    """

    def __init__(self, config: DrafterConfig, mask_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        h = config.hidden_size
        self.fc = nn.Linear(config.num_features, h, bias=False)
        self.hidden_norm = RMSNorm(h, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(h, config.rms_norm_eps)
        self.carryover_embedding = nn.Parameter(torch.zeros(h)) if config.carryover else None
        self.mask_embedding = nn.Parameter(torch.zeros(h)) if mask_embedding else None
        own, head_rows = config.own_vocabulary, config.draft_vocab_size or config.vocab_size
        # frozen, as the target's are
        self.embed_tokens = nn.Embedding(config.vocab_size, h).requires_grad_(False) if own else None
        self.lm_head = nn.Linear(h, head_rows, bias=False).requires_grad_(False) if own else None
        d2t = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("d2t", d2t)
        self.d2t: Tensor | None
        # What bind() found and caches are plain attributes: they are not part of the checkpoint.
        self._embed: Tensor | None = None
        self._head: Tensor | None = None
        self._fast_head: Tensor | PackedWeight | None = None
        self._head_key: tuple[object, ...] | None = None
        self._embed_scale = 1.0
        self._soft_cap: float | None = None
        self._packed: _Packed | None = None
        self._stamp: tuple[int, ...] | None = None
        self._rotary: Tensor | None = None

    # -- checkpoints -------------------------------------------------------------------------------
    @classmethod
    def from_pretrained(cls, directory: str | Path, dtype: torch.dtype | None = None) -> DFlashDrafter:
        """Load ``config.json`` and safetensors from a folder.

        Raises FileNotFoundError for a missing file, ValueError for a corrupt one, for a missing or unexpected
        tensor, for a wrong shape, and for a config that the drafter does not implement.
        """
        return cls._load(DrafterConfig.from_pretrained(directory), directory, dtype)

    @classmethod
    def _load(cls, config: DrafterConfig, directory: str | Path, dtype: torch.dtype | None) -> DFlashDrafter:
        cls._check_config(config)
        tensors = read_tensors(directory)
        model = cls(config, mask_embedding="mask_embedding" in tensors)
        check_tensors(tensors, model.state_dict(), directory)
        model.load_state_dict(tensors)
        check_draft_vocabulary(model.d2t, config.vocab_size)
        return model.to(dtype or fast_dtype("cpu")).eval()

    @classmethod
    def _check_config(cls, config: DrafterConfig) -> None:
        if config.markov_rank > 0:
            raise ValueError(
                f"markov_rank={config.markov_rank}: the checkpoint has a Markov head; load it with "
                "carryover_ext.drafters.load_drafter"
            )

    def save_pretrained(self, directory: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each atomically, in the dtype of the
        parameters.
        """
        self.config.save_pretrained(directory)
        write_tensors(directory, self.state_dict())

    # -- target ------------------------------------------------------------------------------------
    def bind(
        self,
        embed_tokens_weight: Tensor,
        lm_head_weight: Tensor,
        *,
        embed_scale: float = 1.0,
        logit_soft_cap: float | None = None,
        num_layers: int | None = None,
        hidden_size: int | None = None,
        tap_ids: list[int] | tuple[int, ...] | None = None,
    ) -> DFlashDrafter:
        """Take embedding and head ``[V, Ht]`` from the target; the rows of a reduced head are gathered once.
        A drafter with its own embedding and head only checks that these are the target's shapes.

        ``embed_scale`` and ``logit_soft_cap`` are the target's (Gemma; an embedding of the drafter's own is
        not scaled); ``num_layers``, ``hidden_size`` and ``tap_ids``, when given, are checked against the
        checkpoint. Raises ValueError when the checkpoint was made for another target.
        """
        c = self.config
        check_target(c, embed_tokens_weight, lm_head_weight, num_layers, hidden_size, tap_ids)
        check_draft_vocabulary(self.d2t, c.vocab_size)
        reference, d2t = self.fc.weight, self.d2t
        if self.embed_tokens is not None and self.lm_head is not None:
            embed_tokens_weight, lm_head_weight = self.embed_tokens.weight, self.lm_head.weight
            embed_scale, d2t = 1.0, None  # the head has the rows of the draft vocabulary already
        scale = embed_scale if c.input_embedding_scale is None else c.input_embedding_scale
        # Gemma rounds its scale to the dtype of the embedding before it multiplies.
        self._embed_scale = float(torch.tensor(scale, dtype=embed_tokens_weight.dtype))
        self._soft_cap = logit_soft_cap if c.final_logit_softcapping is None else c.final_logit_softcapping
        stamp = tuple(map(fingerprint, self.parameters()))
        if self._stamp != stamp:  # written to through `.data`, too
            self._packed, self._stamp = None, stamp
        key = (
            content(lm_head_weight),
            fingerprint(lm_head_weight),
            reference.dtype,
            reference.device,
            None if d2t is None else content(d2t),
        )
        if self._head_key != key:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # bound while decoding, it must still serve training
                head = lm_head_weight.detach()
                if d2t is not None:
                    head = head[d2t.to(head.device)]
                self._head = head.to(device=reference.device, dtype=reference.dtype).contiguous()
                self._fast_head = pack(self._head)
        self._head_key = key
        self._embed = embed_tokens_weight.detach()
        return self

    # -- weights -----------------------------------------------------------------------------------
    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def _draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def rotary(self, length: int) -> Tensor:
        """Table ``[>= length, rot]`` float32 on the drafter's device; grows by doubling."""
        if self._rotary is None or self._rotary.shape[0] < length or self._rotary.device != self.device:
            size = max(
                length, self.config.block_size, 2 * (0 if self._rotary is None else self._rotary.shape[0])
            )
            with torch.inference_mode(False):  # a table made while decoding must still serve training
                self._rotary = rotary_table(self.config, size, self.device)
        return self._rotary

    def kv_weights(self, cos_sin: Tensor, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """Weights in the order of :func:`carryover_ext.ops.project_kv`, freshly stacked: differentiable."""
        attention = [layer.self_attn for layer in self._draft_layers()]
        kv = torch.cat([w for a in attention for w in (a.k_proj.weight, a.v_proj.weight)])
        k_norm = torch.stack([a.k_norm.weight for a in attention])
        embedding = self.carryover_embedding
        weights: list[Tensor | None] = [
            self.fc.weight,
            self.hidden_norm.weight,
            kv,
            k_norm,
            cos_sin,
            embedding,
        ]
        if dtype is not None:
            # The rotary table stays in float32.
            weights = [w if w is None or w is cos_sin else w.to(dtype) for w in weights]
        return tuple(weights)

    def pack(self) -> _Packed:
        """Fused copies of the weights for decoding, kept until a parameter changes (in place, by loading, or
        by ``to``; writes through ``.data`` are noticed by :meth:`bind`, hence at the start of a stream).
        """
        if torch.compiler.is_compiling():
            if self._packed is None:
                raise RuntimeError("pack() must run once before the drafter is compiled or exported")
            return self._packed
        key = tuple(map(content, self.parameters()))
        if self._packed is None or self._packed.key != key:
            with torch.inference_mode(False), torch.no_grad():
                empty = torch.empty(0)
                kv = tuple(None if w is None else w.detach() for w in self.kv_weights(empty))
                layers = [tuple(w.detach() for w in layer.fused()) for layer in self._draft_layers()]
            fast = [tuple(pack(w) if i != 2 else w for i, w in enumerate(x)) for x in layers]
            self._packed = _Packed(key, kv, layers, fast)
        return self._packed

    # -- decoding ----------------------------------------------------------------------------------
    def new_cache(
        self, batch: int, capacity: int, page_size: int | None = None, block_table: Tensor | None = None
    ) -> DrafterCache:
        """An empty cache for ``batch`` requests of at most ``capacity`` committed rows each."""
        c = self.config
        pages = capacity if block_table is None or page_size is None else block_table.shape[1] * page_size
        return DrafterCache(
            layers=c.num_hidden_layers,
            batch=batch,
            capacity=capacity,
            kv_heads=c.num_key_value_heads,
            head_dim=int(c.head_dim or 0),
            segment_rows=c.num_drafts,
            cos_sin=self.rotary(max(pages, capacity) + c.verify_rows + (page_size or 0) + 1),
            dtype=self.dtype,
            device=self.device,
            page_size=page_size,
            block_table=block_table,
        )

    def commit(
        self,
        cache: DrafterCache,
        features: Tensor,
        positions: Tensor | None,
        row_start: Tensor,
        num_accepted: Tensor,
        carry: bool = True,
    ) -> None:
        """Take the verified rows of a round: committed rows into the cache, rejected ones into the segment,
        lengths forward.

        Args:
            features: tapped target states ``[T, n * Ht]`` of every verified row, accepted or not.
            positions: ``[T]`` int32 verify positions, None: each request's rows follow its committed ones.
            row_start: ``[B+1]`` int32, request i owns rows ``row_start[i] .. row_start[i+1]-1``.
            num_accepted: ``[B]`` int32; rows 0..m are committed. Prefill: ``n_i - 1``. -1: the request takes
                no part.
            carry: False leaves the segment empty, which is the baseline drafter. A checkpoint without
                carryover never carries.

        Raises ValueError when a row would be committed past the capacity (checked on the CPU only: elsewhere
        it would cost a sync).
        """
        if features.dim() != 2 or features.shape[1] != self.config.num_features:
            raise ValueError(
                f"features is {tuple(features.shape)}: must be [rows, {self.config.num_features}], the taps "
                f"{self.config.target_layer_ids} of width {self.config.target_hidden_size} side by side"
            )
        rows = features.shape[0]
        if cache.lens.device.type == "cpu" and not torch.compiler.is_compiling() and cache.batch:
            most = int((cache.lens + num_accepted).max()) + 1
            if most > cache.capacity:
                raise ValueError(
                    f"num_accepted would commit {most} rows: the cache has "
                    f"capacity={cache.capacity} a request"
                )
        if positions is None:
            positions = cache.positions(row_start, rows)
        slots = cache.slots(positions, row_start)
        if self.config.carry_positions == "shifted":
            request = cache.requests(row_start, rows)
            offset = torch.arange(rows, dtype=torch.int32, device=row_start.device) - row_start[request]
            rejected = (offset > num_accepted[request]) & (positions >= 0)
            positions = positions + rejected.to(torch.int32)
        fc, norm, kv, k_norm, _, embedding = self.pack().kv
        ops.commit_and_carry(
            features.to(self.dtype),
            positions,
            row_start,
            num_accepted,
            slots,
            cache.k,
            cache.v,
            cache.k_segment,
            cache.v_segment,
            cache.segment_lens,
            fc,
            norm,
            kv,
            k_norm,
            cache.cos_sin,
            embedding,
            eps=self.config.rms_norm_eps,
            carry_embed_at=self.config.carry_embed_at,
            carry=carry and self.config.carryover,
        )
        cache.lens.add_(num_accepted + 1)

    def draft(
        self,
        cache: DrafterCache,
        anchor: Tensor,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        num_drafts: int | None = None,
        sampling: Sampling | None = None,
        active: Tensor | None = None,
    ) -> Drafts:
        """Propose ``num_drafts`` tokens (None: as many as trained) after each anchor ``[B]`` int64, which
        sits at position ``cache.lens``.

        ``sampling`` (or ``temperature`` alone) is the law of the drafts; greedy drafts have no ``probs``.
        ``active [B]`` bool: requests that take no part cost no attention; their tokens are meaningless.
        Raises ValueError for a block longer than trained.
        """
        first = self.config.first_slot
        rows = self.check_block(None if num_drafts is None else num_drafts + 1) - 1 + first
        lens = cache.lens if active is None else torch.where(active, cache.lens, -1)
        x = self._block(cache, lens, anchor, rows)
        hidden = rms_norm(x[:, first:], self.norm.weight, self.config.rms_norm_eps)
        sampling = Sampling(temperature) if sampling is None else sampling
        return self._propose(hidden, anchor, sampling, generator)

    def _logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._bound("_head" if torch.compiler.is_compiling() else "_fast_head"))

    def _propose(
        self, hidden: Tensor, anchor: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Drafts:
        """Tokens from normed rows ``[B, K, H]``: here each slot by itself."""
        logits = self._logits(hidden)
        if sampling.temperature == 0:
            tokens = logits.argmax(-1)
            return Drafts(tokens if self.d2t is None else self.d2t[tokens])
        probs = probabilities(self._capped(logits), sampling)
        tokens = sample(probs, generator)
        return Drafts(tokens if self.d2t is None else self.d2t[tokens], self._spread(probs))

    def _spread(self, probs: Tensor) -> Tensor:
        """Probabilities of head rows ``[..., Vd]`` as those of target tokens ``[..., V]``."""
        if self.d2t is None:
            return probs
        full = probs.new_zeros(*probs.shape[:-1], self.config.vocab_size)
        return full.index_copy_(-1, self.d2t, probs)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self._soft_cap
        return logits if not cap else torch.tanh(logits / cap) * cap

    def check_block(self, block: int | None) -> int:
        """The rows to verify (None: as trained): the anchor and its drafts. ValueError when there is no
        draft, or more than trained.
        """
        trained = self.config.verify_rows
        if block is not None and not 2 <= block <= trained:
            raise ValueError(
                f"block_size={block}: must be in 2..{trained}, the length that the drafter was trained with"
            )
        return trained if block is None else block

    def _bound(self, name: str) -> Any:
        tensor = getattr(self, name)
        if tensor is None:
            raise RuntimeError(
                "the drafter has no target yet: call drafter.bind(embed_tokens_weight, lm_head_weight) first"
            )
        return tensor

    def block_embeddings(self, anchor: Tensor, block: int) -> Tensor:
        """Input rows ``[B, block, H]``: the embedding of the anchor, then mask rows."""
        table = self._bound("_embed")
        mask: Tensor | None = self.mask_embedding
        if mask is None:
            mask = table[self.config.mask_token_id].to(self.dtype) * self._embed_scale
        first = F.embedding(anchor, table).to(self.dtype) * self._embed_scale
        return torch.cat([first[:, None], mask.expand(anchor.shape[0], block - 1, -1)], 1)

    def _block(self, cache: DrafterCache, lens: Tensor, anchor: Tensor, block: int) -> Tensor:
        x = self.block_embeddings(anchor, block)
        positions = lens.clamp_min(0)[:, None] + torch.arange(block, dtype=torch.int32, device=lens.device)
        return block_forward(
            self._draft_layers(),
            self.pack().layers if torch.compiler.is_compiling() else self.pack().fast,
            x,
            cache.cos_sin[positions],
            (cache.k, cache.v),
            lens,
            (cache.k_segment, cache.v_segment),
            cache.segment_lens,
            cache.block_table,
        )

    # -- training ----------------------------------------------------------------------------------
    def hidden(
        self,
        x: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        context_lens: Tensor,
        k_segment: Tensor | None = None,
        v_segment: Tensor | None = None,
        segment_lens: Tensor | None = None,
        *,
        block_table: Tensor | None = None,
        block_lens: Tensor | None = None,
        cos_sin: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Differentiable forward of blocks: rows after the final norm, ``[B, b, H]``; multiply by the head
        for logits.

        Args:
            x: input rows ``[B, b, H]``, see :meth:`block_embeddings`.
            k_cache, v_cache: ``[L, N, page, nkv, d]`` from ``ops.project_kv``; with a ``block_table`` blocks
                may share pages.
            context_lens: ``[B]`` int32; block row i sits at position ``context_lens + i``. -1: an empty batch
                row, zeros come out.
            k_segment, v_segment: ``[L, B, R, nkv, d]`` or None; segment_lens ``[B]`` int32.
            block_lens: ``[B]`` int32, rows of each block that exist, None: all.
            cos_sin: rotary table; None: the drafter's own, which must already be long enough to avoid a sync.
            dtype: precision of weights and activations, None: that of the parameters. The caches must have
                it.
        """
        weights = [layer.fused(dtype) for layer in self._draft_layers()]
        norm = self.norm.weight if dtype is None else self.norm.weight.to(dtype)
        if dtype is not None:
            x = x.to(dtype)
        if cos_sin is None:
            cos_sin = self.rotary(int(context_lens.max()) + x.shape[1] + 1 if context_lens.numel() else 1)
        rows = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
        positions = context_lens.clamp_min(0)[:, None] + rows
        segment = None if k_segment is None or v_segment is None else (k_segment, v_segment)
        x = block_forward(
            self._draft_layers(),
            weights,
            x,
            cos_sin[positions],
            (k_cache, v_cache),
            context_lens,
            segment,
            segment_lens,
            block_table,
            block_lens,
        )
        return rms_norm(x, norm, self.config.rms_norm_eps)
