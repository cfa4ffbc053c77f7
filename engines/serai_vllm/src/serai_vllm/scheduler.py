"""vLLM's scheduler with phases: `vllm serve … --scheduler-cls serai_vllm.scheduler.PhaseScheduler`.

Two hooks that vLLM has for other purposes do it (0.25 and later):

* DECODE: `schedule(throttle_prefills=True)`, made for data-parallel balancing, defers new and half-done prompts while
  anything decodes. `prefill_capacity_bound` would switch it off when prompts queue up, which here is just what they do.
* PREFILL: `next_decode_eligible_step`, made for pipeline parallelism, passes over a running request for one call.

It extends AsyncScheduler: a subclass of Scheduler would switch asynchronous scheduling off. The engine waits for
nothing here: the phase is one attribute, which the channel's thread sets. Preemption stays as it is in every phase, and
with asynchronous scheduling a phase takes effect one step late.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from serai_vllm.channel import VARIABLE, Channel
from serai_vllm.phases import Phase, Phases

logger = init_logger(__name__)


class PhaseScheduler(AsyncScheduler):
    """Without an agent (`SERAI_PHASE_SOCKET` not set, nobody listens, or silence) it is AsyncScheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self, "prefill_capacity_bound") or not hasattr(self, "current_step"):
            raise RuntimeError("this vLLM has not the hooks that PhaseScheduler needs: 0.25 or later")
        self.phases = Phases()
        self._tokens_max: int = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens: int
        self._steps: deque[tuple[float, int, int]] = deque()
        """Of the steps under way, oldest first: when planned, tokens of prompts, requests that decode."""
        self._ended_at_s = 0.0
        name = os.environ.get(VARIABLE, "")
        self._channel = Channel(name, self._on_phase) if name else None
        logger.info("Phases are set through %s", name or f"nothing: {VARIABLE} is not set")

    def schedule(self, throttle_prefills: bool = False) -> Any:
        now = time.monotonic()
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        waiting = self.get_request_counts()[1]
        prefillable = waiting > 0 or len(decoding) < len(self.running)
        phase = self.phases.plan(prefillable=prefillable, decodable=bool(decoding))
        if phase is Phase.DECODE:
            self.prefill_capacity_bound = False
            throttle_prefills = True
        elif phase is Phase.PREFILL:
            throttle_prefills = False
            # schedule() counts current_step up before it compares: this passes over the coming call alone.
            eligible = self.current_step + 2
            for request in decoding:
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, eligible)
        most = self.phases.prompt_tokens_max
        if most is not None:
            # Decodes come first in vLLM's budget, so what is left of it is for prompts.
            decodes_tokens = 0 if phase is Phase.PREFILL else len(decoding) * (1 + self.num_spec_tokens)
            self.max_num_scheduled_tokens = min(self._tokens_max, most + decodes_tokens)
        output = super().schedule(throttle_prefills)
        self.max_num_scheduled_tokens = self._tokens_max
        tokens = output.total_num_scheduled_tokens
        self.phases.planned(phase, tokens)
        if self._channel is not None:
            scheduled = output.num_scheduled_tokens
            decodes = [scheduled[request.request_id] for request in decoding if request.request_id in scheduled]
            self._steps.append((now, tokens - sum(decodes), len(decodes)))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._channel is not None and self._steps:
            self._told(self._channel)
        return outputs

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
        super().shutdown()

    def _told(self, channel: Channel) -> None:
        """Tells of the oldest step under way, which has just ended."""
        now = time.monotonic()
        planned_at_s, prefill_tokens, decodes = self._steps.popleft()
        # Steps overlap with asynchronous scheduling: one begins when the one before has ended.
        step_s = now - max(planned_at_s, self._ended_at_s)
        self._ended_at_s = now
        if not prefill_tokens and not decodes:
            return
        backlog_tokens = context_tokens = 0
        for request in self.running:
            if request.is_prefill_chunk:
                backlog_tokens += request.num_tokens - request.num_computed_tokens
            else:
                context_tokens += request.num_computed_tokens
        for request in self.waiting:
            backlog_tokens += request.num_tokens - request.num_computed_tokens
        pool = self.kv_cache_manager.block_pool
        channel.say(
            {
                "step_s": round(step_s, 6),
                "prefill_tokens": prefill_tokens,
                "decodes": decodes,
                "backlog_tokens": backlog_tokens,
                "context_tokens": context_tokens,
                "kv_tokens_free": pool.get_num_free_blocks() * self.block_size,
                "kv_tokens_total": (pool.num_gpu_blocks - 1) * self.block_size,
                "sequences_max": self.max_num_running_reqs,
            }
        )

    def _on_phase(self, name: str, prompt_tokens_max: int | None) -> None:
        try:
            self.phases.target = Phase(name)
        except ValueError:
            self.phases.target, prompt_tokens_max = Phase.MIXED, None
        self.phases.prompt_tokens_max = prompt_tokens_max
