"""The batch scheduler: `begin_step` decides what runs next and for how long, `end_step` what came of it.

A step costs what changes in it, not what runs in it. While a sequence decodes nothing of it is touched: how much it
has said, when it ends and when it needs its next KV block follow from the number of decode steps since it joined.
Ends stand in a table by decode step; sequences that need a block at the same steps (every `block_tokens`) share one
counter.

Tokens: a prompt of P leaves P tokens in the cache and gives the first token; each decode step writes the last token
said and gives the next. So who has said n holds P + n − 1 tokens, also after a preemption, when P + n − 1 tokens and
the one not written yet are computed as one prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import chain

from serai.engine_emulator.batching.kv_blocks import KvBlocks
from serai.engine_emulator.batching.sequence import Place, Sequence
from serai.engine_emulator.batching.settings import BatchMode, BatchSettings, Phase
from serai.engine_emulator.batching.steps import Decoded, RunningStep, StepKind, StepOutcome
from serai.performance.latency_model import LatencyModel, PrefillChunk, Step

Pieces = list[tuple[Sequence, int]]
"""Prompts to work on in one step, and how many tokens of each."""


class TooLong(ValueError):
    """A sequence that can never fit; the text names the numbers."""


class BatchEngine:
    """One engine instance: submit, then begin and end steps; the caller keeps the time.

    `step_noise` gives a factor for each step's duration. `energy_j` (for example `RooflineModel.energy_j`) has the
    energy of every step added up; without it nothing is.
    """

    def __init__(
        self,
        model: LatencyModel,
        settings: BatchSettings,
        *,
        step_noise: Callable[[], float] | None = None,
        energy_j: Callable[[Step], float] | None = None,
    ) -> None:
        self.settings = settings
        self.prompt_tokens_max: int | None = None
        """PHASE_GATED only: tokens of prompts in one step, below `step_tokens_max`; a prompt is cut there. Whoever
        decides on phases decides on this, from step to step."""
        self.decode_steps = 0
        self.context_tokens = 0
        """Tokens that the decoding sequences have in the cache."""
        self.busy_s = 0.0
        self.prefill_busy_s = 0.0
        """Time of the steps that worked on prompts, among others."""
        self.energy_j = 0.0
        self.preemptions_total = 0
        self.preempted_waiting = 0
        """Waiting sequences that ran before."""
        self.prefilled_tokens_total = 0
        """Tokens of prompts that were computed, again after preemptions too."""
        self.prefix_queries_tokens = 0
        """Tokens looked up in the prefix cache, once per sequence."""
        self.prefix_hits_tokens = 0
        self.prefill_backlog_tokens = 0
        """Tokens that waiting and half-processed prompts still have to be computed; of those that wait, cached ones
        too."""
        self.step: RunningStep | None = None
        """The running step."""
        self.slots_withheld = 0
        """Slots that nobody gets: for a caller whose requests may hold one without running."""
        self._model = model
        self._noise = step_noise
        self._step_energy_j = energy_j
        self._block_tokens = settings.block_tokens
        self._reserve = settings.reserve
        self._mixed = settings.mode is BatchMode.MIXED
        self._phase = Phase.PREFILL
        self._blocks = KvBlocks(settings.kv_tokens // settings.block_tokens)
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._arrived: OrderedDict[Sequence, None] = OrderedDict()
        self._running: dict[Sequence, None] = {}
        """All that hold a slot, in order of admission."""
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._grown_steps = 0
        """`decode_steps`, and one more while a step runs that decodes: the steps whose tokens have their blocks."""
        self._growing = [0] * settings.block_tokens
        """How many decoding sequences need a block in decode steps of this residue."""
        self._ends: dict[int, dict[Sequence, None]] = {}
        self._to_say = 0
        """Tokens the running sequences have still to say."""
        self._joined: list[Sequence] = []
        """Decoding sequences that no decode step has held yet."""
        self._preempted: list[Sequence] = []
        self._head: tuple[Sequence, int, int, int] | None = None
        """What the prefix cache had for the first that waits: sequence, version, blocks, idle ones among them."""

    # Phases

    @property
    def phase(self) -> Phase:
        """PHASE_GATED only: what its next steps do. Setting it takes effect with the next step."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        if self._is_gated:
            self._mixed = phase is Phase.MIXED

    @property
    def prefill_open(self) -> bool:
        """Whether the phase lets prompts be worked on. Setting it chooses between PREFILL and DECODE."""
        return self._phase is not Phase.DECODE

    @prefill_open.setter
    def prefill_open(self, is_open: bool) -> None:
        self.phase = Phase.PREFILL if is_open else Phase.DECODE

    # Views

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._waiting) + len(self._arrived)

    @property
    def decoding(self) -> Collection[Sequence]:
        """Sequences past their prompt, in the order in which they got there."""
        return self._decoding.keys()

    @property
    def waiting_sequences(self) -> Iterable[Sequence]:
        """Sequences that wait; who comes with its KV computed first, then in the order of their turn."""
        return chain(self._arrived, self._waiting)

    @property
    def kv_tokens_used(self) -> int:
        """Tokens that the blocks in use hold or could hold."""
        return self._blocks.used * self._block_tokens

    @property
    def kv_tokens_free(self) -> int:
        """Tokens that fit into the other blocks, those with an idle prefix included."""
        return self._blocks.free * self._block_tokens

    @property
    def kv_tokens_idle(self) -> int:
        """Tokens of prefixes that nobody holds and that can still be found."""
        return self._blocks.idle * self._block_tokens

    @property
    def kv_tokens_total(self) -> int:
        """Capacity, in whole blocks."""
        return self._blocks.total * self._block_tokens

    def produced(self, sequence: Sequence) -> int:
        """How many tokens `sequence` has said so far, those of an earlier engine included."""
        if sequence.place is Place.DECODING:
            return sequence.said + self.decode_steps - sequence.joined_at
        return sequence.said

    # Coming and going

    def submit(self, sequence: Sequence, now_s: float) -> None:
        """Take `sequence` in. Raises TooLong when it can never fit, ValueError when it cannot be."""
        self._check(sequence)
        sequence.submitted_at_s = now_s
        if sequence.prefilled:
            sequence.place = Place.ARRIVED
            self._arrived[sequence] = None
        else:
            sequence.place = Place.WAITING
            self._waiting[sequence] = None
            self.prefill_backlog_tokens += sequence.prompt_tokens

    def abort(self, sequence: Sequence, now_s: float) -> None:
        """`sequence` is not wanted any more: its slot and its blocks are free at once. Idempotent."""
        match sequence.place:
            case Place.OUTSIDE | Place.ENDED:
                return
            case Place.ARRIVED:
                del self._arrived[sequence]
            case Place.WAITING:
                del self._waiting[sequence]
                self.preempted_waiting -= sequence.preemptions > 0
                self.prefill_backlog_tokens -= sequence.goal
            case Place.PREFILLING:
                self._leave_prefill(sequence)
                self._leave_slot(sequence)
            case Place.DECODING:
                self._leave_decode(sequence)
                self._leave_slot(sequence)
            case Place.KEPT:
                self._free_blocks(sequence)
        sequence.place = Place.ENDED
        sequence.finished_at_s = now_s

    def release(self, sequence: Sequence) -> None:
        """The KV that a finished sequence has kept is not needed any more. Idempotent."""
        if sequence.place is Place.KEPT:
            self._free_blocks(sequence)
            sequence.place = Place.ENDED

    # Steps

    def begin_step(self, now_s: float) -> RunningStep | None:
        """Begin the next step at `now_s`. None when nothing can run: idle, gated, or KV held until `release`."""
        if self.step is not None:
            raise RuntimeError("a step is running; end it first")
        pieces = self._plan(now_s)
        decodes = self._grown_steps != self.decode_steps
        if not pieces and not decodes and self._preempted:
            # All that ran was preempted; what waits may fit where they were.
            pieces = self._plan(now_s)
            decodes = self._grown_steps != self.decode_steps
        if not pieces and not decodes:
            return None
        self.step = self._timed(pieces, decodes, now_s)
        return self.step

    def end_step(self) -> StepOutcome:
        """The running step is over: what it brought."""
        running = self.step
        if running is None:
            raise RuntimeError("no step is running; begin one first")
        self.step = None
        finished: list[Sequence] = []
        size = 0
        decodes = self._grown_steps != self.decode_steps
        if decodes:
            size = len(self._decoding)
            self.decode_steps += 1
            self.context_tokens += size
            self._to_say -= size
            for sequence in self._ends.pop(self.decode_steps, ()):
                self._leave_decode(sequence)
                self._finish(sequence, running.ends_at_s, finished)
        preempted, self._preempted = self._preempted, []
        if not running.prefilled:
            return StepOutcome([], Decoded(self._decoding, (), finished, size), finished, preempted)
        first, again = self._end_pieces(running, finished)
        decoded = Decoded(self._decoding, first, finished, size + len(again)) if decodes else again
        return StepOutcome(first, decoded, finished, preempted)

    def _timed(self, pieces: Pieces, decodes: bool, now_s: float) -> RunningStep:
        """The step of `pieces` and, with `decodes`, one token for every decoding sequence."""
        count, context = (len(self._decoding), self.context_tokens) if decodes else (0, 0)
        step = Step([PrefillChunk(tokens, sequence.computed) for sequence, tokens in pieces], count, context)
        duration_s = self._model.step_s(step)
        if self._noise is not None:
            duration_s *= self._noise()
        self.busy_s += duration_s
        kind: StepKind = "decode"
        if pieces:
            kind = "mixed" if decodes else "prefill"
            self.prefill_busy_s += duration_s
        if self._step_energy_j is not None:
            self.energy_j += self._step_energy_j(step)
        if decodes and self._joined:
            for sequence in self._joined:
                if sequence.decode_began_at_s is None and sequence.place is Place.DECODING:
                    sequence.decode_began_at_s = now_s
            self._joined.clear()
        return RunningStep(step, now_s, now_s + duration_s, kind, tuple(pieces))

    # What runs next

    def _plan(self, now_s: float) -> Pieces:
        """Prompts to work on in the next step. Decodes take part when `_grown_steps` is ahead of `decode_steps`."""
        if self._arrived:
            self._admit_arrived(now_s)
        if self._mixed:
            return self._plan_mixed(now_s)
        pieces: Pieces = []
        if (self._waiting or self._prefilling) and self._phase is not Phase.DECODE:
            pieces = self._prefill_batch(now_s)
        if not pieces:
            self._grow()
        return pieces

    def _plan_mixed(self, now_s: float) -> Pieces:
        preempted = len(self._preempted)
        self._grow()
        budget = self.settings.step_tokens_max - len(self._decoding)
        if self.prompt_tokens_max is not None:
            budget = min(budget, self.prompt_tokens_max)
        pieces: Pieces = []
        for sequence in list(self._prefilling) if self._prefilling else ():
            tokens = min(self._longest_piece(sequence), budget)
            if tokens and sequence.place is Place.PREFILLING and self._make_room(sequence, tokens):
                pieces.append((sequence, tokens))
                budget -= tokens
        if not self._decoding:
            self._grown_steps = self.decode_steps  # all of them were preempted
        if len(self._preempted) == preempted:
            while self._waiting and budget and self._has_slot:
                admitted = self._admit_first(now_s, budget)
                if admitted is None:
                    break
                tokens = min(self._longest_piece(admitted), budget)
                pieces.append((admitted, tokens))
                budget -= tokens
        return pieces

    def _prefill_batch(self, now_s: float) -> Pieces:
        """Half-processed prompts first, then waiting ones, as far as budget, slots and blocks go."""
        budget = self._batch_budget
        pieces: Pieces = []
        for sequence in list(self._prefilling) if self._prefilling else ():
            tokens = self._piece_in_batch(sequence, budget, first=not pieces)
            if not tokens:
                return pieces
            # Only who was let in by a mixed step lacks blocks for the rest of its prompt.
            if sequence.place is Place.PREFILLING and self._make_room(sequence, tokens):
                pieces.append((sequence, tokens))
                budget -= tokens
        while self._waiting and budget > 0 and self._has_slot:
            sequence = next(iter(self._waiting))
            hits, _ = self._prefix_of(sequence)
            rest = sequence.goal - hits * self._block_tokens
            if not self._cuts and pieces and rest > budget:
                break
            if self._admit_first(now_s, sequence.goal) is None:
                break
            tokens = self._piece_in_batch(sequence, budget, first=not pieces)
            pieces.append((sequence, tokens))
            budget -= tokens
        return pieces

    def _piece_in_batch(self, sequence: Sequence, budget: int, *, first: bool) -> int:
        tokens = self._longest_piece(sequence)
        if self._cuts:
            return min(tokens, budget)
        return tokens if first or tokens <= budget else 0

    def _longest_piece(self, sequence: Sequence) -> int:
        rest = sequence.goal - sequence.computed
        longest = self.settings.chunk_tokens_max
        return rest if longest is None or rest < longest else longest

    @property
    def _batch_budget(self) -> int:
        most = self.settings.step_tokens_max
        return most if self.prompt_tokens_max is None else min(most, self.prompt_tokens_max)

    @property
    def _cuts(self) -> bool:
        """Whether a prompt may be cut at the end of a batch."""
        return self.settings.chunk_tokens_max is not None or self.prompt_tokens_max is not None

    @property
    def _has_slot(self) -> bool:
        return len(self._running) + self.slots_withheld < self.settings.sequences_max

    @property
    def _is_gated(self) -> bool:
        return self.settings.mode is BatchMode.PHASE_GATED

    # Admission

    def _admit_first(self, now_s: float, budget: int) -> Sequence | None:
        """Give the first that waits a slot and the blocks of what it is about to compute: the next piece when MIXED,
        which is how vLLM takes them, else the whole prompt. None when it does not fit."""
        sequence = next(iter(self._waiting))
        hits, idle_hits = self._prefix_of(sequence)
        cached = hits * self._block_tokens
        tokens = sequence.goal
        if self._mixed:
            rest = sequence.goal - cached
            longest = self.settings.chunk_tokens_max or rest
            tokens = cached + min(rest, budget, longest)
        new = -(-tokens // self._block_tokens) - hits
        if not self._fits(new + idle_hits, sequence.to_say):
            return None
        del self._waiting[sequence]
        self.preempted_waiting -= sequence.preemptions > 0
        self._head = None
        if hits:
            sequence.held_keys.extend(sequence.block_keys[:hits])
            self._blocks.hold(sequence.held_keys)
        self._blocks.take(new)
        sequence.blocks = new + hits
        sequence.computed = cached
        self.prefill_backlog_tokens -= cached
        if sequence.scheduled_at_s is None:
            sequence.scheduled_at_s = now_s
            sequence.cached_tokens = cached
            if self.settings.prefix_cache:
                self.prefix_queries_tokens += sequence.prompt_tokens
                self.prefix_hits_tokens += cached
        sequence.place = Place.PREFILLING
        self._prefilling[sequence] = None
        self._take_slot(sequence)
        return sequence

    def _admit_arrived(self, now_s: float) -> None:
        """Who comes with its KV computed needs no prefill: it decodes as soon as it has a slot and room.

        Room is also asked for the blocks that the coming decode step needs, lest it lose at once what was sent."""
        while self._arrived and self._has_slot:
            sequence = next(iter(self._arrived))
            blocks = -(-sequence.prompt_tokens // self._block_tokens)
            growth = self._growing[self.decode_steps % self._block_tokens]
            growth += sequence.prompt_tokens % self._block_tokens == 0
            if not self._fits(blocks + growth, sequence.to_say):
                return
            del self._arrived[sequence]
            self._blocks.take(blocks)
            if sequence.scheduled_at_s is None:
                sequence.scheduled_at_s = now_s
            self._take_slot(sequence)
            self._join_decode(sequence, sequence.prompt_tokens)

    def _fits(self, blocks: int, to_say: int) -> bool:
        """Whether `blocks` are free beside the reserve. With nothing running the reserve does not count: who can
        only run alone must be let in."""
        free = self._blocks.free
        if blocks > free:
            return False
        if not self._reserve or not self._running:
            return True
        return blocks + self._reserve * (self._to_say + to_say) / self._block_tokens <= free

    def _prefix_of(self, sequence: Sequence) -> tuple[int, int]:
        """Blocks of the first that waits that are in the prefix cache, and the idle ones among them. At least one
        token is left to compute."""
        if not sequence.block_keys or not self.settings.prefix_cache:
            return 0, 0
        version = self._blocks.prefixes_version
        if self._head is None or self._head[0] is not sequence or self._head[1] != version:
            most = (sequence.goal - 1) // self._block_tokens
            self._head = (sequence, version, *self._blocks.leading(sequence.block_keys, most))
        return self._head[2], self._head[3]

    def _take_slot(self, sequence: Sequence) -> None:
        self._running[sequence] = None
        self._to_say += sequence.to_say

    # KV growth and preemption

    def _grow(self) -> None:
        """Give every decoding sequence room for its next token, taking it from others when nothing is free."""
        if not self._decoding:
            return
        residue = self.decode_steps % self._block_tokens
        while self._growing[residue] > self._blocks.free:
            self._preempt(self._victim())
        if self._decoding:
            self._blocks.take(self._growing[residue])
            self._grown_steps = self.decode_steps + 1

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for the next `tokens` of an unfinished prompt. False when it had to give way itself."""
        needed = max(0, -(-(sequence.computed + tokens) // self._block_tokens) - sequence.blocks)
        while needed > self._blocks.free:
            victim = self._victim()
            self._preempt(victim)
            if victim is sequence:
                return False
        self._blocks.take(needed)
        sequence.blocks += needed
        return True

    def _victim(self) -> Sequence:
        """vLLM: who was admitted last. SGLang: who has said least, of these the longest prompt."""
        if self.settings.mode is not BatchMode.PREFILL_FIRST:
            return next(reversed(self._running))
        return min(self._decoding, key=lambda one: (one.said - one.joined_at, -one.prompt_tokens))

    def _preempt(self, sequence: Sequence) -> None:
        """Its KV is dropped and it waits again; what it has said is computed again with its prompt. vLLM lets it
        come first then, SGLang last."""
        if sequence.place is Place.PREFILLING:
            self._leave_prefill(sequence)
        else:
            self._leave_decode(sequence)
        self._leave_slot(sequence)
        sequence.place = Place.WAITING
        sequence.goal = sequence.prompt_tokens + sequence.said
        sequence.computed = 0
        sequence.preemptions += 1
        self._waiting[sequence] = None
        if self.settings.mode is not BatchMode.PREFILL_FIRST:
            self._waiting.move_to_end(sequence, last=False)
        self.prefill_backlog_tokens += sequence.goal
        self.preemptions_total += 1
        self.preempted_waiting += 1
        self._preempted.append(sequence)

    # Through prefill and decode, and out

    def _end_pieces(self, running: RunningStep, finished: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Note what was computed. Who said its first token, and who said one after computing again."""
        first: list[Sequence] = []
        again: list[Sequence] = []
        for sequence, tokens in running.prefilled:
            if sequence.place is not Place.PREFILLING:
                continue  # aborted meanwhile
            self._share_computed(sequence, tokens)
            sequence.computed += tokens
            self.prefill_backlog_tokens -= tokens
            self.prefilled_tokens_total += tokens
            if sequence.computed < sequence.goal:
                continue
            (again if sequence.said else first).append(sequence)
            if sequence.first_token_at_s is None and not sequence.prefilled:
                sequence.first_token_at_s = running.ends_at_s
            self._leave_prefill(sequence)
            sequence.said += 1
            self._to_say -= 1
            if sequence.to_say:
                self._join_decode(sequence, sequence.goal)
            else:
                self._finish(sequence, running.ends_at_s, finished)
        return first, again

    def _share_computed(self, sequence: Sequence, tokens: int) -> None:
        """Let others find the prompt's blocks that are full now."""
        if not sequence.block_keys or not self.settings.prefix_cache:
            return
        before, after = sequence.computed // self._block_tokens, (sequence.computed + tokens) // self._block_tokens
        sequence.held_keys += self._blocks.share(sequence.block_keys[before:after])

    def _join_decode(self, sequence: Sequence, kv_tokens: int) -> None:
        sequence.place = Place.DECODING
        sequence.joined_at = self.decode_steps
        sequence.joined_kv = kv_tokens
        sequence.finish_step = self.decode_steps + sequence.to_say
        self._decoding[sequence] = None
        self._ends.setdefault(sequence.finish_step, {})[sequence] = None
        self._growing[(sequence.joined_at - kv_tokens) % self._block_tokens] += 1
        self.context_tokens += kv_tokens
        self._joined.append(sequence)

    def _leave_decode(self, sequence: Sequence) -> None:
        """Write down what the counters knew."""
        del self._decoding[sequence]
        ends = self._ends.get(sequence.finish_step)
        if ends is not None:
            del ends[sequence]
            if not ends:
                del self._ends[sequence.finish_step]
        self._growing[(sequence.joined_at - sequence.joined_kv) % self._block_tokens] -= 1
        steps = self.decode_steps - sequence.joined_at
        self.context_tokens -= sequence.joined_kv + steps
        sequence.said += steps
        written = sequence.joined_kv + self._grown_steps - sequence.joined_at
        sequence.blocks = -(-written // self._block_tokens)

    def _leave_prefill(self, sequence: Sequence) -> None:
        del self._prefilling[sequence]
        self.prefill_backlog_tokens -= sequence.goal - sequence.computed

    def _leave_slot(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self._to_say -= sequence.to_say
        self._free_blocks(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        self._blocks.give_back(sequence.blocks, sequence.held_keys)
        sequence.held_keys.clear()
        sequence.blocks = 0

    def _finish(self, sequence: Sequence, now_s: float, finished: list[Sequence]) -> None:
        if sequence.keeps_blocks:
            del self._running[sequence]
            sequence.place = Place.KEPT
        else:
            self._leave_slot(sequence)
            sequence.place = Place.ENDED
        sequence.finished_at_s = now_s
        finished.append(sequence)

    def _check(self, sequence: Sequence) -> None:
        if sequence.place is not Place.OUTSIDE:
            raise ValueError(f"{sequence} was submitted before; make a new one")
        if sequence.prompt_tokens < 1 or sequence.output_tokens < 1:
            raise ValueError(f"{sequence} needs at least one token of prompt and of output")
        if sequence.prefilled and (sequence.prefill_only or sequence.output_tokens < 2):
            raise ValueError(f"{sequence} comes with its first token said and has nothing left to say here")
        if len(sequence.block_keys) > sequence.prompt_tokens // self._block_tokens:
            raise ValueError(
                f"{sequence} has {len(sequence.block_keys)} block keys, more than full blocks of its prompt"
            )
        tokens = sequence.prompt_tokens + (0 if sequence.prefill_only else sequence.output_tokens - 1)
        if -(-tokens // self._block_tokens) > self._blocks.total:
            raise TooLong(
                f"{sequence.prompt_tokens} tokens of prompt and {sequence.output_tokens} of output need "
                f"{tokens} tokens of KV cache; this engine has {self.kv_tokens_total}"
            )
