"""Run by vLLM's own Python (test_vllm_scheduler.py): the real scheduler class, without a model behind it.

Says one JSON object on standard output: what each phase's steps held.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from serai_vllm.phases import Phase
from serai_vllm.scheduler import PhaseScheduler

BLOCK_TOKENS, CHUNK_TOKENS = 16, 64


class Bench:
    """A scheduler whose model says token 7 for everybody."""

    def __init__(self, model: str, blocks: int = 200, sequences: int = 8) -> None:
        config = EngineArgs(
            model=model, max_model_len=512, max_num_seqs=sequences, max_num_batched_tokens=CHUNK_TOKENS,
            enable_prefix_caching=False, scheduler_cls="serai_vllm.scheduler.PhaseScheduler", enforce_eager=True,
        ).create_engine_config()  # fmt: skip
        assert config.scheduler_config.get_scheduler_cls() is PhaseScheduler
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = PhaseScheduler(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        init_none_hash(hash)
        self._hasher: Any = get_request_block_hasher(BLOCK_TOKENS, hash)
        self.said: dict[str, int] = {}
        self.finished: set[str] = set()

    def add(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        self.scheduler.add_request(
            Request(name, list(range(1, prompt_tokens + 1)), params, None, block_hasher=self._hasher)
        )
        self.said[name] = 0

    def phase(self, phase: Phase) -> None:
        self.scheduler.phases.target = phase

    def step(self) -> dict[str, int]:
        """Tokens by request."""
        output = self.scheduler.schedule()
        scheduled = dict(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        names = list(scheduled)
        # As a model runner does: a token for everybody whose tokens are all computed by this step.
        tokens = [[7] if not requests[name].is_prefill_chunk else [] for name in names]
        told = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: n for n, name in enumerate(names)}, sampled_token_ids=tokens,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        for outputs in self.scheduler.update_from_output(output, told).values():
            for one in outputs.outputs:
                self.said[one.request_id] += len(one.new_token_ids)
                if one.finished:
                    self.finished.add(one.request_id)
        return scheduled

    def steps(self, count: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(count)]

    def until_done(self, steps_max: int = 500) -> list[dict[str, int]]:
        done = []
        while self.scheduler.has_unfinished_requests() and len(done) < steps_max:
            done.append(self.step())
        return done


def phases(model: str) -> dict[str, object]:
    """Two decode; a third comes, longer than one step's tokens."""
    bench = Bench(model)
    bench.add("a", 20, 60)
    bench.add("b", 20, 60)
    bench.step()
    bench.add("c", 150, 4)
    found: dict[str, object] = {}
    bench.phase(Phase.DECODE)
    found["decode"] = bench.steps(5)
    bench.phase(Phase.PREFILL)
    found["prefill"] = bench.steps(3)
    found["nothing to prefill"] = bench.steps(2)
    bench.add("d", 100, 4)
    bench.phase(Phase.PREFILL)
    found["half"] = bench.steps(1)
    bench.phase(Phase.DECODE)
    found["half held back"] = bench.steps(2)
    bench.phase(Phase.MIXED)
    found["mixed"] = bench.steps(1)
    found["rest"] = len(bench.until_done())
    found["said"] = bench.said
    found["finished"] = sorted(bench.finished)
    return found


def alone(model: str) -> dict[str, object]:
    """DECODE with nothing to decode."""
    bench = Bench(model)
    bench.phase(Phase.DECODE)
    bench.add("a", 100, 3)
    return {"steps": bench.until_done(), "said": bench.said}


def full(model: str, blocks: int, sequences: int) -> dict[str, object]:
    """PREFILL while what waits does not fit: all must end, with few steps in vain."""
    bench = Bench(model, blocks, sequences)
    bench.phase(Phase.PREFILL)
    for n in range(6):
        bench.add(f"r{n}", 60, 40)
    steps = bench.until_done(2000)
    return {"steps": len(steps), "in vain": sum(not step for step in steps), "said": bench.said}


def main() -> None:
    model = sys.argv[1]
    found = {
        "phases": phases(model),
        "alone": alone(model),
        "no KV": full(model, 16, 8),
        "no slots": full(model, 200, 2),
        "class": [one.__name__ for one in PhaseScheduler.__mro__],
    }
    print("\nFOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
