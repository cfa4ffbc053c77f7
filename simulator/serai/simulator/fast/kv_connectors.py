"""How released disaggregated engines hand KV over, and what that costs the engines themselves. Pure.

An instance without a connector gives its KV to a link and goes on: the ideal that papers draw. These are what the
code of the PaDG paper's time does; each rule has its source.

`Migration` is DistServe (LLMServe/DistServe, commit 82831f1):

- `distserve/decoding_stage_scheduler.py`, `post_process`: between two steps the decoding stage accepts migrating
  requests one by one and awaits each, so it copies or computes. It accepts only while the blocks of those that wait
  for their first decode step are fewer than `waiting_block_prop_threshold` of its cache (`distserve/llm.py`: 0.05).
- `distserve/engine.py`, `LLMEngine`: one context engine and one decoding engine on one node; so pairs, as many as fit.

`ObjectStore` is vLLM 0.7 with Mooncake's store. Of its connectors only this one takes any number of instances on
either side (vLLM 0.7.3, `vllm/config.py`, `KVTransferConfig.kv_rank`: "Currently only 1P1D is supported"; Mooncake,
`doc/en/vllm-integration-v1.md`: "XpYd support"), and the paper searched for the best ratio.

- vLLM 0.7.3, `vllm/worker/model_runner.py`, `execute_model`: a decode instance receives in a step of its own for the
  prompts that its scheduler would have computed there ("NOTE: The receive operation is blocking"), and its decoding
  requests wait; a prefill instance sends at the end of the step that computed, before anybody hears of its tokens.
- vLLM pull request 12957, `vllm/distributed/kv_transfer/kv_connector/mooncake_store_connector.py`: request after
  request, on each rank; hidden states of the whole prompt go along from each rank.
- The same, `kv_lookup_buffer/mooncake_store.py`: an object is a string of safetensors, made and read on the host, and
  neither side goes on before that is done ("A message queue needs to be introduced before making it asynchronous").
- kvcache-ai/Mooncake, `mooncake-integration/vllm/distributed_object_store.cpp` (1d3ad70): `put` and `get` copy the
  string once or twice more, and wait for the transfer; one replica. `doc/en/mooncake-store-preview.md`: a client of
  each rank lends a segment, and an object goes into one drawn at random. So most objects cross the network twice.
- vLLM, `examples/online_serving/disagg_examples/disagg_proxy_demo.py` (same pull request): both instances are chosen
  in turn, and the client's first token is the decode instance's.

Left out, which is kind to both: the store's capacity, remote calls and Python of both engines, that vLLM hands over
answers of one token too. Left out, either way: DistServe swaps where this preempts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

# Measured on one core of an EPYC (bench/results/amd-epyc-2-cores-2026-12-01/kv-host-copies.json): the same copies and
# the same serialisation of 16 MiB, a copy between host buffers in place of the one from or to the GPU. With larger
# objects every buffer is fresh memory, and page faults brought both down to 0.35e9 there. So these are the fast end.
SAVE_BYTES_S = 1.9e9
"""From GPU memory into the store's buffer, a rank."""
LOAD_BYTES_S = 2.4e9
"""From the store's buffer into GPU memory, a rank."""


@dataclass(frozen=True, slots=True)
class Migration:
    """DistServe's: the decoding stage fetches, between its steps."""

    waiting_share: float = 0.05
    """Of the decode cache: blocks of accepted requests that do not decode yet, above which none is accepted."""

    def __post_init__(self) -> None:
        if not 0 < self.waiting_share <= 1:
            raise ValueError(f"waiting_share must be above 0 and at most 1, not {self.waiting_share}")

    def accepts(self, waiting_tokens: int, kv_tokens_total: int) -> bool:
        """Whether one more may come while `waiting_tokens` of the cache are taken by requests that do not decode."""
        return waiting_tokens < self.waiting_share * kv_tokens_total


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """vLLM's with Mooncake's store: put inside the step that computed, got inside a step of the decode instance."""

    ranks: int = 1
    """GPUs of an instance (tensor parallel): each puts and gets its share, at the same time as the others."""
    hidden_bytes_per_token: float = 0.0
    """What each rank sends beside its share of the KV: the hidden state of each token of the prompt."""
    step_s: float = 0.0
    """Of a step that only receives: an engine's overhead per step, no model."""
    save_bytes_s: float = SAVE_BYTES_S
    load_bytes_s: float = LOAD_BYTES_S

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {self.ranks}")
        for name in ("save_bytes_s", "load_bytes_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    def object_bytes(self, prompt_tokens: int, kv_bytes_per_token: float) -> float:
        """What one rank puts for a prompt."""
        return prompt_tokens * (kv_bytes_per_token / self.ranks + self.hidden_bytes_per_token)

    def save_s(self, object_bytes: float) -> float:
        """A rank's time before an object of its can go."""
        return object_bytes / self.save_bytes_s

    def load_s(self, object_bytes: float) -> float:
        """A rank's time after an object has come."""
        return object_bytes / self.load_bytes_s


Connector = Migration | ObjectStore


def segment(number: int, rank: int, segments: int) -> int:
    """Where the store puts what `rank` sends of request `number`: any of `segments`, evenly, the same in each run."""
    # Knuth's multiplicative hash; the high bits are the mixed ones.
    mixed = ((number * 64 + rank + 1) * 2654435761) % 2**32
    return (mixed * segments) >> 32


def received_together(
    prompts_tokens: Iterable[int],
    *,
    step_tokens_max: int,
    slots: int,
    room_tokens: int,
    room_for: Callable[[int], int],
) -> int:
    """How many of those that wait, first come first, one step receives: as many prompts as it would have computed, by
    vLLM's rules (a budget of tokens, slots, blocks). A prompt longer than the budget goes alone."""
    count = tokens = 0
    for prompt_tokens in prompts_tokens:
        room = room_for(prompt_tokens)
        if count >= slots or room > room_tokens or (count and tokens + prompt_tokens > step_tokens_max):
            break
        count += 1
        tokens += prompt_tokens
        room_tokens -= room
    return count
