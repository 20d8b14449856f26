"""The public operators, one file each. `carryover_ext.reference` holds their twins in plain PyTorch."""

from .._library import (
    available_capabilities,
    cpu_capability,
    project_crossover,
    set_cpu_capability,
    set_project_crossover,
)
from .accept import accept
from .commit_and_carry import check_commit_and_carry, commit_and_carry
from .gather_rejected import gather_rejected
from .markov_sample import markov_sample
from .project_kv import check_project_kv, project_kv
from .segment_attention import check_segment_attention, segment_attention

__all__ = [
    "accept",
    "available_capabilities",
    "check_commit_and_carry",
    "check_project_kv",
    "check_segment_attention",
    "commit_and_carry",
    "cpu_capability",
    "gather_rejected",
    "markov_sample",
    "project_crossover",
    "project_kv",
    "segment_attention",
    "set_cpu_capability",
    "set_project_crossover",
]
