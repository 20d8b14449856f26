"""Carryover for vLLM's V1 model runner: one override, :meth:`CarryoverProposer.set_inputs_first_pass`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.dflash import DFlashProposer

from .checks import backend_problem, make_plan
from .compat import log, plain
from .judge import mend
from .prefix import PrefixWatch
from .segment import carried_rows, find_rejected, query_slots, slots_of

BUFFERS = ("_context_slot_mapping_buffer", "_context_positions_buffer", "_slot_mapping_buffer", "positions")


class CarryoverProposer(DFlashProposer):
    """vLLM's DFlash proposer that keeps the rejected rows of a step for the next draft.

    With ``carrying`` False it is the stock proposer in every respect.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        self.plan = make_plan(vllm_config)
        super().__init__(vllm_config, device, runner)
        missing = [name for name in BUFFERS if not hasattr(self, name)]
        off = self.plan.off or (f"DFlashProposer has no {', '.join(missing)}" if missing else None)
        self.carrying = off is None
        self.watch: PrefixWatch | None = None
        self._of_last_step: set[str] = set()
        if off is not None:
            plain(off)
            return
        self._runner = runner
        log().info(
            "Carryover: V1 runner, %d drafts a round, the rejected ones are carried",
            self.num_speculative_tokens,
        )

    def _draft_past_the_limit(self, runner: Any) -> None:
        """The stock runner stops drafting for the whole batch, and leaves its context rows unwritten, once
        one request is within a block of the length limit. Here rows past the limit have no slot and their
        drafts are cut by the scheduler, so that the others need not stop."""
        if hasattr(runner, "_input_fits_in_drafter"):
            runner._input_fits_in_drafter = lambda metadata: metadata is not None
        else:
            log().warning(
                "this vLLM's runner has no _input_fits_in_drafter: drafting may pause for all requests while "
                "one is near the length limit"
            )

    def initialize_attn_backend(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_attn_backend(kv_cache_config, *args, **kwargs)
        if self.device.type == "cpu":  # not before the runner has put the CPU's kernels in place
            mend(self.device)
        problem = backend_problem(group.backend.get_name() for group in self.draft_attn_groups)
        if self.carrying and problem is not None:
            self.carrying = False
            plain(problem)
        if self.carrying:  # not before it is certain: the stock proposer needs the pause at the limit
            self._draft_past_the_limit(self._runner)
            self.watch = PrefixWatch.of(self.vllm_config, kv_cache_config, self.device)

    def _check_restored(self, watch: PrefixWatch, table: Tensor) -> None:
        """Requests that were not in the step before start behind the tokens that were computed for them."""
        ids = list(self._runner.input_batch.req_ids[: table.shape[0]])
        for i, request in enumerate(ids):
            if request not in self._of_last_step:
                state = self._runner.requests[request]
                known = (state.prompt_token_ids or [])[: state.num_computed_tokens]
                watch.check(request, table[i], known, self.block_size)
        self._of_last_step = set(ids)

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: Any,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, Any]:
        num_query, sample_indices, metadata = super().set_inputs_first_pass(
            target_token_ids=target_token_ids,
            next_token_ids=next_token_ids,
            target_positions=target_positions,
            target_hidden_states=target_hidden_states,
            token_indices_to_sample=token_indices_to_sample,
            cad=cad,
            num_rejected_tokens_gpu=num_rejected_tokens_gpu,
        )
        if not self.carrying:
            return num_query, sample_indices, metadata
        batch, limit = cad.batch_size(), self.max_model_len
        query_rows = num_query // batch
        table, block_size = cad.block_table_tensor, self.block_size
        lens = metadata.seq_lens[:batch] - query_rows
        slots = self._context_slot_mapping_buffer[: target_hidden_states.shape[0]]
        is_carried = torch.zeros_like(slots, dtype=torch.bool)
        if num_rejected_tokens_gpu is None:
            carried = torch.zeros_like(lens)
        else:
            rejected = num_rejected_tokens_gpu[:batch]
            carried = carried_rows(rejected, lens, query_rows, limit, self.plan.window)
            rows = find_rejected(
                target_hidden_states.shape[0], cad.query_start_loc[: batch + 1], rejected, carried
            )
            self.model.mark_rows(target_hidden_states, rows.carried, once=True)
            verified = target_positions[0] if target_positions.dim() == 2 else target_positions
            is_carried = rows.carried
            positions = self._context_positions_buffer[: rows.carried.shape[0]]
            # Rejected rows sit where verification put them; which slots the stock kernel gave them does not
            # matter.
            own = slots_of(table, rows.request, verified, block_size, limit)
            slots.copy_(torch.where(rows.carried, own, slots).masked_fill_(rows.dropped, -1))
            positions.copy_(torch.where(rows.carried, verified + int(self.plan.shifted), positions))
        # Context rows past the drafter's rotary table, and query rows past the limit, read its last row.
        self._context_positions_buffer[: target_hidden_states.shape[0]].clamp_(max=self.plan.limit - 1)
        self.positions[:num_query].clamp_(max=min(limit, self.plan.limit) - 1)
        query = query_slots(table, lens + carried, query_rows, block_size, limit)
        self._slot_mapping_buffer[:num_query] = query
        metadata.seq_lens = (metadata.seq_lens + carried).clamp_max(limit)
        metadata.max_seq_len = min(metadata.max_seq_len, limit)
        if self.watch is not None:
            # what this step writes first: a request may start behind blocks that another one fills in it
            self.watch.note(slots, target_token_ids, is_carried, query)
            self._check_restored(self.watch, table)
        return num_query, sample_indices, metadata
