"""The Markov drafter: DFlash's backbone with DSpark's first-order head (arXiv 2607.05147).

The backbone computes the base logits of all slots at once; the block is then sampled left to right, each
token with a low-rank bias that depends on the one before it. Both layouts load: DSpark's own checkpoints are
anchor-first.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from .. import ops
from ..acceptance import Sampling, probabilities, sample, uniforms
from ..config import DrafterConfig
from .checkpoint import reduced_vocabulary, write_tensors
from .dflash import DFlashDrafter, Drafts


class MarkovHead(nn.Module):
    """Bias on the logits of a slot from the token before it. Tensor names are those of DeepSpec.

    ``vanilla``: ``w2 w1[x]``. ``gated``: ``w2 (g * w1[x])``, the gate g from the slot's hidden state and
    w1[x]. ``rnn``: a state of the block so far, updated by a gate and a candidate, and an output that w2
    projects.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        r, h = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, r)
        self.markov_w2 = nn.Linear(r, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(h + r, r)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * r + h, 3 * r)

    def bias(self, tokens: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot: ``tokens [B]`` before it, its ``hidden [B, H]``, the state (None at the first slot).

        Returns the bias ``[B, Vd]`` and the state for the next slot (None but for ``rnn``).
        """
        latent = self.markov_w1(tokens)
        if self.kind == "gated":
            latent = latent * torch.sigmoid(self.gate_proj(torch.cat([hidden, latent], -1)))
        elif self.kind == "rnn":
            state = torch.zeros_like(latent) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat([state, latent, hidden], -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            latent = torch.tanh(out)
        return self.markov_w2(latent), state


class ConfidenceHead(nn.Module):
    """DSpark's estimate of a draft's acceptance. Loaded and saved; fixed-length drafting does not ask it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size = config.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
        self.proj = nn.Linear(size, 1)


class MarkovDrafter(DFlashDrafter):
    """Methods, cache and parameters of :class:`DFlashDrafter`, with ``markov_head.*`` and, when the config
    has it, ``confidence_head.*``.
    """

    def __init__(self, config: DrafterConfig, mask_embedding: bool = False) -> None:
        self._check_config(config)
        super().__init__(config, mask_embedding)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    @classmethod
    def _check_config(cls, config: DrafterConfig) -> None:
        if config.markov_rank < 1:
            raise ValueError(
                "markov_rank=0: the checkpoint has no Markov head; load it with "
                "carryover_ext.drafters.load_drafter"
            )

    def save_pretrained(self, directory: str | Path) -> None:
        """As :meth:`DFlashDrafter.save_pretrained`; the rows of a reduced head are written when bound."""
        self.config.save_pretrained(directory)
        tensors = self.state_dict()
        if self.d2t is not None:
            rows = None if self.lm_head is not None else self._head  # its own head is among the tensors
            tensors |= reduced_vocabulary(self.d2t, self.config.vocab_size, rows)
        write_tensors(directory, tensors)

    def _propose(
        self, hidden: Tensor, anchor: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Drafts:
        # The soft cap is the target's and bounds the base logits; the bias comes on top, as it was trained.
        logits = self._capped(self._logits(hidden))
        whole = sampling.temperature == 0 or (sampling.top_k == 0 and sampling.top_p >= 1)
        if self.markov_head.kind != "vanilla" or not whole:
            return self._step_by_step(logits, hidden, anchor, sampling, generator)
        w1, w2 = self.markov_head.markov_w1.weight.detach(), self.markov_head.markov_w2.weight.detach()
        if sampling.temperature == 0:
            return Drafts(ops.markov_sample(logits, anchor, w1, w2, self.d2t)[0])
        u = uniforms((logits.shape[0], logits.shape[1]), logits.device, generator)
        tokens, _, probs = ops.markov_sample(logits, anchor, w1, w2, self.d2t, u, sampling.temperature, True)
        return Drafts(tokens, self._spread(probs))

    def _step_by_step(
        self,
        logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> Drafts:
        """Slot after slot through :mod:`carryover_ext.acceptance`: the q that is returned drew the token."""
        token, state = anchor, None
        tokens, laws = [], []
        for k in range(logits.shape[1]):
            bias, state = self.markov_head.bias(token, hidden[:, k], state)
            step = logits[:, k] + bias
            if sampling.temperature == 0:
                column = step.argmax(-1)
            else:
                laws.append(probabilities(step, sampling))
                column = sample(laws[-1], generator)
            token = column if self.d2t is None else self.d2t[column]
            tokens.append(token)
        return Drafts(torch.stack(tokens, 1), self._spread(torch.stack(laws, 1)) if laws else None)
