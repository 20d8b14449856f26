"""A tiny random target and tiny random drafters, written by this package and exported for vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from carryover_ext.config import DSPARK, CarryoverConfig, DrafterConfig
from carryover_ext.drafters import DFlashDrafter, MarkovDrafter, load_drafter
from carryover_ext.export import export_checkpoint
from carryover_ext.integrations.vllm import DFLASH2_ARCHITECTURE

LAYERS, HIDDEN, VOCAB, TAPS, BLOCK = 4, 64, 300, [0, 2], 5
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MASK = 3
SHARP = 3.0  # factor of the target's logits: at T=1 a handful of tokens has most of the mass


def save_target(folder: Path, seed: int = 0) -> Path:
    """A Llama of 4 layers with an untied head, in float32; random, but sharp enough to be free of ties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
        **HEADS,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARP)
    model.save_pretrained(folder)
    return folder


def save_drafter(
    folder: Path,
    target: Path,
    *,
    markov: bool = False,
    dflash2: bool = False,
    seed: int = 1,
    **changes: object,
) -> Path:
    """A random Carryover drafter in this package's own layout (``folder/own``) and as exported
    (``folder/vllm``), with ``dflash2`` there as a DFlash2 drafter that drafts the same."""
    torch.manual_seed(seed)
    shape: dict = {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "num_target_layers": LAYERS,
        "target_layer_ids": TAPS,
        "mask_token_id": MASK,
        "block_size": BLOCK,
        "max_position_embeddings": 512,
        **HEADS,
    }
    if changes.get("hidden_size", HIDDEN) != HIDDEN:
        shape |= {"target_hidden_size": HIDDEN, "tie_word_embeddings": False}
    if markov:
        shape |= {"markov_rank": 16, "architectures": [DSPARK]}
    carry = changes.pop("carryover_config", CarryoverConfig())
    config = DrafterConfig(**(shape | changes), carryover_config=carry)
    drafter = (MarkovDrafter if markov else DFlashDrafter)(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2:
                # as sharp as the target's head is
                sharp = SHARP if name in ("markov_head.markov_w2.weight", "lm_head.weight") else 1.0
                torch.nn.init.normal_(parameter, std=1.5 * sharp * parameter.shape[1] ** -0.5)
            elif name == "carryover_embedding":
                torch.nn.init.normal_(parameter, std=2.0)
            elif "k_norm" in name:  # sharp attention: a single row decides now and then
                torch.nn.init.constant_(parameter, 2.0)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.randperm(VOCAB)[: drafter.d2t.numel()].sort().values)
    drafter.save_pretrained(folder / "own")
    load_drafter(folder / "own", torch.float32)  # what the tests compare with must load
    export_checkpoint(folder / "own", folder / "vllm", "vllm", target=str(target))
    if dflash2:
        _as_dflash2(folder / "vllm", config)
    return folder


def _as_dflash2(folder: Path, config: DrafterConfig) -> None:
    """Add what DFlash2 has more than DFlash, such that it changes nothing: the first tap of each convolution
    is one and the others are zero, and the selector's scores of pairs are zero."""
    taps, groups, rank, hidden = 2, 4, 8, config.hidden_size
    tensors = load_file(folder / "model.safetensors")
    for i in range(config.num_hidden_layers):
        for name in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
            kernel = torch.zeros(2, taps, hidden)
            kernel[:, 0] = 1
            tensors[f"{name}.base_kernel"] = kernel
            tensors[f"{name}.kernel_projection.weight"] = torch.zeros(2 * taps * groups, hidden)
    for name in ("predecessor", "successor"):
        tensors[f"candidate_selector.{name}_codebook"] = torch.zeros(config.vocab_size, rank)
    tensors["candidate_selector.hidden_projection.weight"] = torch.zeros(rank, hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["architectures"] = [DFLASH2_ARCHITECTURE, "DFlash2DraftModel"]
    values["dflash_config"] |= {
        "conv_kernel_size": taps,
        "conv_group_size": hidden // groups,
        "selector_rank": rank,
        "selector_top_k": 4,
    }
    (folder / "config.json").write_text(json.dumps(values))
