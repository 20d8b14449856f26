"""Carryover Drafting: speculative decoding that recycles the hidden states of rejected draft tokens."""

__version__ = "0.1.0"
