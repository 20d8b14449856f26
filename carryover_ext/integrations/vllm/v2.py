"""Carryover for vLLM's V2 model runner: ``prepare_dflash_inputs`` is wrapped. It runs eagerly before a
round's graph is replayed and writes the buffers that the graph reads: slots, positions, lengths, and which
rows the model is to add the embedding to.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as stock
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from .checks import backend_problem, make_plan
from .compat import log, plain
from .prefix import PrefixWatch
from .segment import carried_rows, find_rejected, query_slots, slots_of

_active: CarryoverMixin | None = None  # the speculator whose propose() is running


def _wrap() -> None:
    """Wrap the stock function once; it stays as it is unless a Carryover speculator is proposing."""
    original = stock.prepare_dflash_inputs
    if hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if _active is not None:
            _active.carry(signature.bind(*args, **kwargs).arguments)

    stock.prepare_dflash_inputs = prepare


class CarryoverMixin:
    """vLLM's speculators that keep the rejected rows of a step for the next draft."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.plan = make_plan(vllm_config)
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self.carrying = self.plan.off is None
        self.watch: PrefixWatch | None = None
        self.restored: dict[str, Sequence[int]] = {}  # of the requests that came in this step
        if self.plan.off is not None:
            plain(self.plan.off)
            return
        _wrap()
        log().info(
            "Carryover: V2 runner, %d drafts a round, the rejected ones are carried",
            self.num_speculative_steps,  # type: ignore[attr-defined]
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        states = self.hidden_states  # type: ignore[attr-defined]
        self.carried = torch.zeros(states.shape[0], dtype=torch.bool, device=states.device)
        if self.carrying:
            self.model.mark_rows(states, self.carried)  # type: ignore[attr-defined]

    def set_attn(self, model_state: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().set_attn(model_state, kv_cache_config, *args, **kwargs)  # type: ignore[misc]
        groups = [group for row in self.attn_groups for group in row]  # type: ignore[attr-defined]
        problem = backend_problem(group.backend.get_name() for group in groups)
        if self.carrying and problem is not None:
            self.carrying = False
            plain(problem)
        if self.carrying:
            self.watch = PrefixWatch.of(self.vllm_config, kv_cache_config, self.device)  # type: ignore[attr-defined]
        if self.watch is not None:
            self._hear_of_requests(model_state)

    def _hear_of_requests(self, model_state: Any) -> None:
        """Keep the restored tokens of each request that comes, for the watch: no speculator is told."""
        add_request = model_state.add_request

        def add(index: int, request: Any) -> None:
            add_request(index, request)
            known = request.prefill_token_ids or request.prompt_token_ids or []
            self.restored[request.req_id] = known[: request.num_computed_tokens]

        model_state.add_request = add

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        global _active
        _active = self if self.carrying else None
        try:
            return super().propose(*args, **kwargs)  # type: ignore[misc]
        finally:
            _active = None

    def carry(self, a: dict[str, Any]) -> None:
        """Move what the stock function laid out for one KV cache group: see :mod:`.segment`."""
        batch_in, buffers = a["input_batch"], a["input_buffers"]
        table, block_size, limit = a["block_table"], a["block_size"], a["max_model_len"]
        query_rows = a["num_query_per_req"]
        batch = a.get("num_reqs_override") or batch_in.num_reqs
        num_rows = batch_in.num_tokens
        row_start = batch_in.query_start_loc[: batch + 1]
        rejected = a["num_rejected"][:batch]
        verified = batch_in.positions[:num_rows].long()
        # The stock lengths are cut at the limit; these are not.
        lens = verified[row_start[1:].long() - rejected.long() - 1] + 1
        carried = carried_rows(rejected, lens, query_rows, limit, self.plan.window)
        rows = find_rejected(num_rows, row_start, rejected, carried)
        self.carried.zero_()
        self.carried[:num_rows] = rows.carried
        context_slots, positions = a["context_slot_mapping"][:num_rows], a["context_positions"][:num_rows]
        own = slots_of(table, rows.request, verified, block_size, limit)
        context_slots.copy_(torch.where(rows.carried, own, context_slots))
        positions.copy_(
            torch.where(rows.carried, verified + int(self.plan.shifted), positions).clamp_(
                max=self.plan.limit - 1
            )
        )
        query = query_slots(table, lens + carried, query_rows, block_size, limit)
        a["query_slot_mapping"][: batch * query_rows] = query
        buffers.positions[: batch * query_rows].clamp_(max=min(limit, self.plan.limit) - 1)
        buffers.seq_lens[:batch] = (lens + query_rows + carried).clamp_max(limit).to(buffers.seq_lens.dtype)
        first_group = self._context_slot_mappings.data_ptr()  # type: ignore[attr-defined]
        if self.watch is not None and a["context_slot_mapping"].data_ptr() == first_group:
            # what this step writes first: a request may start behind blocks that another one fills in it
            self.watch.note(context_slots, batch_in.input_ids[:num_rows], rows.carried, query)
            for i, request in enumerate(batch_in.req_ids[:batch]):
                self.watch.check(request, table[i], self.restored.get(request, ()), block_size)
            self.restored.clear()


class CarryoverSpeculator(CarryoverMixin, DFlashSpeculator):
    pass


class CarryoverDFlash2Speculator(CarryoverMixin, DFlash2Speculator):
    pass


class CarryoverDSparkSpeculator(CarryoverMixin, DSparkSpeculator):
    pass
