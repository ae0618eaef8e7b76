"""Grammars of constrained output: their compilation, and the position of a row in its grammar.

llguidance compiles a grammar to a matcher, which consumes token ids and says which may follow. A position is a function
of the grammar and the output's token ids: a row copies the compiled matcher and consumes the ids, so nothing has to be
kept over a preemption or sent to another executor.

A mask allows, in this order of precedence, the first of these sets that is not empty:

    1. what the grammar allows, without ids outside `allowed_token_ids`, without the stop tokens before `min_tokens`,
       and without the end of the sequence where it is ignored
    2. what the grammar allows, without ids outside `allowed_token_ids`
    3. the end of the sequence, if the grammar accepts the output

So the grammar has precedence over `min_tokens` and `ignore_eos`, and an output that is complete can always end. If all
are empty, the row has no token, which ends its sequence with an error.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from inflight.common.grammar import PARSER_LIMITS, GrammarError
from inflight.common.protocol import MAX_DRAFTS
from inflight.executor.logits.row import MASK_BITS, LogitsRow, mask_of
from inflight.executor.scheduler.sequence import Constraint, Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Mask = npt.NDArray[np.int32]

# Compiled grammars that are kept, and the length of their texts in all. A matcher takes more memory than its text: its
# lexer gains states as texts are matched.
MAX_GRAMMARS = 128
MAX_GRAMMARS_BYTES = 16 << 20
# Threads that compile. A second one goes on while the first works on a grammar near the limits.
NUM_COMPILERS = 2
# Parts of llguidance's errors: of a lexer at one of its limits, and of a token that the grammar does not allow. The
# reason that it gives besides is the same for all failures.
LEXER_ERROR = "lexer error"
REFUSED = "doesn't satisfy the grammar"
TOO_COMPLEX = "the grammar of the constraint is too complex to continue this output"
# Newest states of a row of which the scheduler can learn whether the grammar accepts. Those behind drafts are newer
# than the last token that it knows.
NUM_STATES_KEPT = MAX_DRAFTS + 8
# Processor time of a mask, or of some tokens, that counts for nothing, and what a row may take beyond that in all. The
# limits of llguidance are counts, and in an ambiguous grammar each thing that is counted takes more time the longer the
# output is.
FREE_S = 0.005
MAX_SLOW_S = 0.25
# Tokens that are consumed at once, which holds the interpreter's lock.
MAX_TOKENS_AT_ONCE = 64
# A compiled grammar whose shared lexer is full is compiled again: once by another row, once by this one.
MAX_RENEWALS = 2


def parser_limits() -> LLParserLimits:
    """Returns the limits of a grammar: about 20 ms of lexer construction, 20 ms for a mask, 100 MB of lexer states."""
    return LLParserLimits(**PARSER_LIMITS)


class CompiledGrammar:
    """A grammar that rows copy. The copies share a lexer, which gains states as they match texts."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        """Raises `GrammarError`."""
        self._tokenizer = tokenizer
        self._grammar = grammar
        self.vocabulary_size = tokenizer.vocab_size
        self.matcher = self._compile()

    def renew(self, full: LLMatcher) -> LLMatcher:
        """Returns a compiled matcher other than this one, whose lexer is full, so that what others matched before
        ends no sequence."""
        if self.matcher is full:
            self.matcher = self._compile()
        return self.matcher

    def _compile(self) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            # The first mask builds most of the lexer, which the copies share.
            first = matcher.deep_copy()
            first.compute_bitmask()
            if not first.is_error():
                return matcher
            matcher = first
        raise GrammarError(f"the grammar of the constraint cannot be compiled: {_first_line(matcher.get_error())}")


class Guide:
    """The position of a row in its grammar.

    Only the thread that computes masks uses it, and the device's thread while no mask is being computed. Positions
    behind drafts have guides of their own for one step, which begin as copies of the position before. A matcher with a
    limit of tokens cannot be rolled back, and a copy is exact.
    """

    def __init__(self, constraint: Constraint, stopping: Stopping, allowed: Mask | None, vocabulary_size: int) -> None:
        self._constraint = constraint
        self._stopping = stopping
        self._allowed = allowed
        self._vocabulary_size = vocabulary_size
        self._num_words = -(-vocabulary_size // MASK_BITS)
        # Made at the first use: to consume a long output takes milliseconds, and the forward pass runs meanwhile.
        self._source: LLMatcher | None = None
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._has_ended = False
        self._slow_s = 0.0
        # The position before, until a guide behind drafts is used.
        self._before: Guide | None = None
        self._is_behind_drafts = False

    def behind(self) -> Guide:
        """Returns the guide of the position behind one more draft. It is used after this one in the same step."""
        guide = copy(self)
        guide._before, guide._is_behind_drafts = self, True
        return guide

    @cached_property
    def _ends(self) -> Mask:
        return mask_of(self._constraint.eos_token_ids, self._vocabulary_size)

    @cached_property
    def _stops(self) -> Mask:
        return mask_of(self._stopping.stop_token_ids, self._vocabulary_size)

    @property
    def compiled(self) -> CompiledGrammar:
        compiled: CompiledGrammar | None = self._constraint.compiled
        assert compiled is not None, "the sequence boarded before its grammar was compiled"
        return compiled

    def follow(self, output: npt.NDArray[np.int32]) -> LLMatcher | None:
        """Consumes the new ids of the output. Returns None if no mask is needed, because the output has ended, or the
        grammar refuses the drafts, so that what follows them cannot count."""
        if self._before is not None:
            self._begin_behind(self._before)
            self._before = None
        if self._has_ended:
            return None
        if self._matcher is None:
            self._source = self.compiled.matcher
            self._matcher = self._source.deep_copy()
        token_ids = output[self._num_consumed :].tolist()
        self._num_consumed = len(output)
        if token_ids and token_ids[-1] in self._constraint.eos_token_ids:
            self._has_ended = True
            return None
        if not self._consume(token_ids) and _has_full_lexer(self._matcher):
            self._recover(output)
        self._note_state(len(output), is_new=len(token_ids) > 0)
        if self._is_behind_drafts and self._matcher.is_error() and not _has_full_lexer(self._matcher):
            return None
        return self._matcher

    def _begin_behind(self, before: Guide) -> None:
        self._source, self._num_consumed, self._has_ended = before._source, before._num_consumed, before._has_ended
        self._matcher = None if before._matcher is None else before._matcher.deep_copy()

    def _note_state(self, num_output_tokens: int, *, is_new: bool) -> None:
        assert self._matcher is not None
        accepts, errors = self._constraint.accepts, self._constraint.errors
        accepts[num_output_tokens] = not self._matcher.is_error() and self._matcher.is_accepting()
        # The end of a sequence is decided at most two tokens later.
        accepts.pop(num_output_tokens - NUM_STATES_KEPT, None)
        errors.pop(num_output_tokens - NUM_STATES_KEPT, None)
        if is_new:
            # It may be that of a wrong draft.
            errors.pop(num_output_tokens, None)

    def _consume(self, token_ids: list[int]) -> bool:
        assert self._matcher is not None
        for start in range(0, len(token_ids), MAX_TOKENS_AT_ONCE):
            began_s = time.thread_time()
            is_allowed = self._matcher.consume_tokens(token_ids[start : start + MAX_TOKENS_AT_ONCE])
            self.took(time.thread_time() - began_s)
            if not is_allowed or self.is_too_slow:
                return is_allowed
        return True

    def took(self, seconds: float) -> None:
        """Counts the processor time of a mask or of some tokens."""
        if seconds > FREE_S:
            self._slow_s += seconds - FREE_S
            self._constraint.is_slow = True

    @property
    def is_too_slow(self) -> bool:
        """Whether masks and tokens have taken more than they may, which ends the sequence."""
        return self._slow_s > MAX_SLOW_S

    def mask(self, raw: Mask, output: npt.NDArray[np.int32]) -> Mask:
        """Returns the mask for the next token from the matcher's, which is at least as long. The result may share its
        memory."""
        assert self._matcher is not None
        if self._matcher.is_error():
            # The mask of a matcher that failed allows the end of the sequence.
            recovered = self._recover(output) if _has_full_lexer(self._matcher) else None
            if recovered is None:
                self._constraint.errors[len(output)] = _reason(self._matcher)
                return np.zeros(self._num_words, np.int32)
            raw = recovered
        if self.is_too_slow:
            self._constraint.errors[len(output)] = TOO_COMPLEX
            return np.zeros(self._num_words, np.int32)
        allowed = raw[: self._num_words]
        text = allowed if self._allowed is None else allowed & self._allowed
        banned = self._banned(len(output))
        choices = [text] if banned is None else [text & ~banned, text]
        if self._allowed is not None:
            choices.append(allowed & self._ends)
        return next((choice for choice in choices[:-1] if choice.any()), choices[-1])

    def _banned(self, num_output_tokens: int) -> Mask | None:
        is_early = num_output_tokens < self._stopping.min_tokens
        if self._constraint.ignores_eos:
            return self._ends | self._stops if is_early else self._ends
        return self._stops if is_early else None

    def _recover(self, output: npt.NDArray[np.int32]) -> Mask | None:
        """Consumes the output again with a lexer that others have not filled. Returns the mask, None if that fails,
        too."""
        for _ in range(MAX_RENEWALS):
            assert self._source is not None
            try:
                self._source = self.compiled.renew(self._source)
            except GrammarError:
                return None
            self._matcher = self._source.deep_copy()
            if self._matcher.consume_tokens(output.tolist()):
                raw = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
                if not self._matcher.is_error():
                    return raw
        return None


class MaskFiller:
    """Computes the masks of a step's rows: in a thread of its own while the forward pass runs, or at once."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        # Made at the first use, because it has threads of its own.
        self._executor: LLExecutor | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._scratch = np.zeros((0, 0), np.int32)
        # Whether the masks of a step are measured one by one, because those of the previous one took long.
        self._measures = False

    def start(self, rows: Sequence[LogitsRow]) -> Callable[[], None]:
        """Begins to fill the masks. Returns what waits until they are filled, and raises what went wrong."""
        return self._thread.submit(self.fill, rows).result

    def fill(self, rows: Sequence[LogitsRow]) -> None:
        """Fills the masks of the rows that have a grammar. A step that was launched before its sequence was known to
        have ended gets the previous mask."""
        guided = [(row, row.guide) for row in rows if row.guide is not None]
        followed = [(row, guide, guide.follow(row.output)) for row, guide in guided]
        open_rows = [(row, guide, matcher) for row, guide, matcher in followed if matcher is not None]
        if not open_rows:
            return
        num_words = -(-max(guide.compiled.vocabulary_size for _, guide, _ in open_rows) // MASK_BITS)
        if self._scratch.shape[0] < len(open_rows) or self._scratch.shape[1] != num_words:
            self._scratch = np.zeros((len(open_rows), num_words), np.int32)
        began_s = time.perf_counter()
        if self._measures:
            self._compute_one_by_one([(guide, matcher) for _, guide, matcher in open_rows])
        else:
            self._compute([matcher for _, _, matcher in open_rows])
        # It may be that this thread had to wait, so no row ends for that.
        self._measures = time.perf_counter() - began_s > FREE_S
        for (row, guide, _), raw in zip(open_rows, self._scratch, strict=False):
            assert row.mask is not None
            # Its address stays the same: to ask for one takes longer than to copy a mask.
            row.mask[:] = guide.mask(raw, row.output)

    def _compute(self, matchers: Sequence[LLMatcher]) -> None:
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        rows = [(matcher, i) for i, matcher in enumerate(matchers)]
        num_rows, num_words = self._scratch.shape
        self._executor.unsafe_compute_mask_ptr(rows, self._scratch.ctypes.data, 4 * num_words, num_rows)

    def _compute_one_by_one(self, rows: Sequence[tuple[Guide, LLMatcher]]) -> None:
        for (guide, matcher), raw in zip(rows, self._scratch, strict=False):
            began_s = time.thread_time()
            matcher.unsafe_compute_mask_ptr(raw.ctypes.data, raw.nbytes)
            guide.took(time.thread_time() - began_s)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


class GrammarCache:
    """Compiled grammars by the hash of their text, the least recently used dropped first. Any thread."""

    def __init__(self, max_grammars: int = MAX_GRAMMARS, max_bytes: int = MAX_GRAMMARS_BYTES) -> None:
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._grammars: OrderedDict[bytes, tuple[CompiledGrammar, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._grammars)

    def find(self, key: bytes) -> CompiledGrammar | None:
        with self._lock:
            if key not in self._grammars:
                return None
            self._grammars.move_to_end(key)
            return self._grammars[key][0]

    def add(self, key: bytes, compiled: CompiledGrammar, num_bytes: int) -> None:
        with self._lock:
            if key in self._grammars:
                return
            self._grammars[key] = compiled, num_bytes
            self.num_bytes += num_bytes
            while len(self._grammars) > self._max_grammars or self.num_bytes > self._max_bytes:
                _, (_, dropped_bytes) = self._grammars.popitem(last=False)
                self.num_bytes -= dropped_bytes


class GrammarCompiler:
    """Compiles grammars in threads of its own, each text once while it is in use.

    The vocabulary is read at once, in such a thread: that takes seconds, for which neither the start nor the first
    constrained request should wait.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        vocabulary_size: int,
        eos_token_ids: Sequence[int],
        cache: GrammarCache | None = None,
    ) -> None:
        self.cache = GrammarCache() if cache is None else cache
        self._threads = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammar")
        self._compiling: dict[bytes, Future[CompiledGrammar]] = {}
        self._tokenizer = self._threads.submit(_read_vocabulary, load_tokenizer, vocabulary_size, eos_token_ids)

    def find(self, key: bytes) -> CompiledGrammar | None:
        """Returns the grammar if it is compiled."""
        return self.cache.find(key)

    def compile(self, constraint: Constraint) -> Future[CompiledGrammar]:
        """Starts to compile the grammar, unless that is under way. The result may be a `GrammarError`. One thread
        calls this."""
        key = constraint.key
        if (found := self._compiling.get(key)) is not None and not found.done():
            return found
        self._compiling = {other: future for other, future in self._compiling.items() if not future.done()}
        future = self._threads.submit(self._compile, key, constraint.grammar)
        self._compiling[key] = future
        return future

    def close(self) -> None:
        """Ends the threads after what they compile now."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, key: bytes, grammar: str) -> CompiledGrammar:
        if (found := self.cache.find(key)) is not None:
            return found
        compiled = CompiledGrammar(self._tokenizer.result(), grammar)
        self.cache.add(key, compiled, len(grammar))
        return compiled


def _read_vocabulary(
    load_tokenizer: Callable[[], PreTrainedTokenizerBase], vocabulary_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """Returns the vocabulary as llguidance needs it. Ids of the model without a token are never allowed."""
    if not eos_token_ids:
        raise GrammarError("the model has no end-of-sequence token, which constrained output needs")
    try:
        tokenizer: Any = load_tokenizer()
        return from_tokenizer(tokenizer, n_vocab=max(vocabulary_size, len(tokenizer)), eos_token=list(eos_token_ids))
    except Exception as error:
        raise GrammarError(f"the model's tokenizer cannot be used for constrained output: {error}") from error


def _has_full_lexer(failed: LLMatcher) -> bool:
    return LEXER_ERROR in failed.get_error()


def _reason(failed: LLMatcher) -> str:
    """Returns why no token can follow. llguidance's own text would quote the output."""
    if REFUSED in failed.get_error():
        return "the output so far does not satisfy the grammar of the constraint"
    return TOO_COMPLEX


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
