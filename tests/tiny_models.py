"""A random target with a byte tokenizer and random drafters, as folders: for tests without a download."""

from __future__ import annotations

from pathlib import Path

import torch

LAYERS, HIDDEN, VOCAB = 4, 64, 272
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def save_tokenizer(folder: Path, chat: bool = True) -> None:
    """One token a byte, plus ``<s>``, ``</s>`` and one that no text has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_tokens(["<spare>"], special_tokens=True)
    if chat:
        fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_target(folder: Path, seed: int = 0, chat: bool = True) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=257,
        **heads,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, chat)
    return folder


def save_drafter(folder: Path, carryover: bool, seed: int = 1, block: int = 6, **changes: object) -> Path:
    from carryover_ext.config import CarryoverConfig, DrafterConfig
    from carryover_ext.drafters.dflash import DFlashDrafter

    torch.manual_seed(seed)
    shape: dict = {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "num_target_layers": LAYERS,
        "target_layer_ids": [1, 2],
        "mask_token_id": VOCAB - 1,
        "block_size": block,
    }
    config = DrafterConfig(**(shape | changes), carryover_config=CarryoverConfig() if carryover else None)
    drafter = DFlashDrafter(config)
    if drafter.carryover_embedding is not None:
        torch.nn.init.normal_(drafter.carryover_embedding)
    drafter.save_pretrained(folder)
    return folder
