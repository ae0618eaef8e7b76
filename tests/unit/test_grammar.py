"""Masks of constrained rows: they allow exactly what the grammar allows, and rules that a grammar overrides."""

from __future__ import annotations

import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from inflight.common.grammar import GrammarError
from inflight.common.model_source import load_tokenizer, resolve_model
from inflight.executor.logits import grammar as grammar_module
from inflight.executor.logits.grammar import (
    CompiledGrammar,
    GrammarCache,
    GrammarCompiler,
    Guide,
    MaskFiller,
)
from inflight.executor.logits.row import LogitsRow, bits_of
from inflight.executor.scheduler.sequence import Constraint, FinishReason, Processors, Stopping
from tests.support.text.small_vocabulary import (
    BOS_ID,
    EOS_ID,
    NUM_TOKENS,
    OTHER_EOS_ID,
    PAD_ID,
    TEXTS,
    VOCABULARY_SIZE,
    compiled,
    constraint,
    regex_grammar,
    schema_grammar,
    small_llguidance,
    small_tokenizer,
)

ENDS = {EOS_ID, OTHER_EOS_ID}
SMOLLM2_VOCABULARY = 49_152
SPECIAL_IDS = {PAD_ID, BOS_ID, *ENDS}
PERSON = schema_grammar(
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 3, "maximum": 250},
            "b": {"enum": ["ab", "ba", None]},
            "c": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 3},
            "d": {"type": "string", "maxLength": 5},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
LARK = LLMatcher.grammar_from_lark('start: "a" (part ",")* part\npart: "b" | "ab" | "1"~2..3 | "(" part ")"\n')
LIMITED = LLMatcher.grammar_from_lark('start: "a" some "true" some\nsome[max_tokens=5]: /[a-f]+/\n')
AMBIGUOUS = LLMatcher.grammar_from_lark('start: s\ns: s s | "a" | "b" | s s s\n')


def make_row(
    form: Constraint,
    output: list[int] | None = None,
    *,
    stopping: Stopping | None = None,
    allowed_ids: frozenset[int] = frozenset(),
    max_tokens: int = 200,
) -> LogitsRow:
    stopping = stopping or Stopping(max_tokens, 0, frozenset(ENDS))
    allowed = LogitsRow(Processors(allowed_ids=allowed_ids), [9], 1, 1, VOCABULARY_SIZE).mask
    guide = Guide(form, stopping, allowed, VOCABULARY_SIZE)
    token_ids = [9, 8, *(output or [])]
    return LogitsRow(Processors(allowed_ids=allowed_ids), token_ids, 2, 2 + max_tokens, VOCABULARY_SIZE, guide)


@pytest.fixture(scope="module")
def filler() -> MaskFiller:
    return MaskFiller(2)


def allowed_ids(filler: MaskFiller, row: LogitsRow) -> set[int]:
    filler.fill([row])
    assert row.mask is not None
    assert row.mask.dtype == np.int32
    assert len(row.mask) == -(-VOCABULARY_SIZE // 32)
    assert not bits_of(row.mask, 32 * len(row.mask))[VOCABULARY_SIZE:].any()
    return set(np.flatnonzero(bits_of(row.mask, VOCABULARY_SIZE)).tolist())


@pytest.mark.parametrize("grammar", [PERSON, LARK, regex_grammar(r"(ab|ba)*c|[0-9]{2,4}é?")])
@pytest.mark.parametrize("seed", range(4))
def test_mask_bit_is_set_where_the_grammar_accepts_the_token(filler: MaskFiller, grammar: str, seed: int) -> None:
    choose = random.Random(seed)
    row, reference = make_row(constraint(grammar)), compiled(grammar).matcher.deep_copy()
    for _ in range(40):
        ids = allowed_ids(filler, row)
        accepted = {i for i in range(VOCABULARY_SIZE) if reference.validate_tokens([i]) == 1}
        assert ids - ENDS == accepted - ENDS
        assert ids & ENDS == (ENDS if reference.is_accepting() else set())
        if not ids - ENDS:
            return
        token_id = choose.choice(sorted(ids - ENDS))
        row.append(token_id)
        assert reference.consume_token(token_id)


# Languages of which every word up to the length is listed, so that what may follow a text is known without a parser.
@pytest.mark.parametrize(
    ("pattern", "alphabet", "longest"),
    [
        (r"(ab|ba)c?1{0,2}", "abc12", 5),
        (r"a?b{2}(12|2)*", "ab12", 6),
        (r"(a|ab)(c|bcd)?", "abcd", 5),
        (r"a{2,4}", "ab", 5),
    ],
)
def test_mask_is_what_the_words_of_a_language_go_on_with(
    filler: MaskFiller, pattern: str, alphabet: str, longest: int
) -> None:
    texts = ("".join(letters) for size in range(longest + 1) for letters in product(alphabet, repeat=size))
    words = {text for text in texts if re.fullmatch(pattern, text)}
    form = constraint(regex_grammar(pattern))
    num_states = 0

    def visit(output: list[int], text: str) -> None:
        nonlocal num_states
        num_states += 1
        # A token goes on with the text if some word begins with both; the longest words are beyond the list.
        going_on = {i for i in range(len(SPECIAL_IDS), NUM_TOKENS) if any(w.startswith(text + TEXTS[i]) for w in words)}
        ids = allowed_ids(filler, make_row(form, output))
        assert ids & ENDS == (ENDS if text in words else set()), text
        if len(text) + max(map(len, TEXTS[len(SPECIAL_IDS) :])) <= longest or "*" not in pattern:
            assert ids - ENDS == going_on, text
        else:
            assert ids - ENDS >= going_on, text
        for token_id in going_on:
            visit([*output, token_id], text + TEXTS[token_id])

    visit([], "")
    assert num_states > 4


def test_ids_without_a_token_and_special_tokens_are_never_allowed(filler: MaskFiller) -> None:
    ids = allowed_ids(filler, make_row(constraint(regex_grammar("(.|\n)+"))))
    assert ids == set(range(len(SPECIAL_IDS), NUM_TOKENS))


def test_state_is_a_function_of_the_output(filler: MaskFiller) -> None:
    choose, form = random.Random(7), constraint(PERSON)
    row, output = make_row(form), list[int]()
    for _ in range(30):
        ids = allowed_ids(filler, row)
        assert allowed_ids(filler, make_row(form, output)) == ids, "replayed at once"
        if not ids - ENDS:
            break
        output.append(choose.choice(sorted(ids - ENDS)))
        row.append(output[-1])
    assert form.accepts[len(output)]


def test_complete_output_can_only_end_and_is_not_advanced_behind_its_end(filler: MaskFiller) -> None:
    form = constraint(regex_grammar("ab"))
    row = make_row(form)
    for token_id in (TEXTS.index("a"), TEXTS.index("b")):
        filler.fill([row])
        row.append(token_id)
    assert allowed_ids(filler, row) == ENDS
    row.append(EOS_ID)
    # The step that was launched before the end was read.
    assert allowed_ids(filler, row) == ENDS
    row.append(TEXTS.index("z"))
    assert allowed_ids(filler, row) == ENDS
    assert not form.errors


def test_token_that_the_grammar_refuses_leaves_no_token(filler: MaskFiller) -> None:
    form = constraint(regex_grammar("[ab]+"))
    row, matcher = make_row(form, [TEXTS.index("a"), TEXTS.index("z")]), form.compiled.matcher
    assert allowed_ids(filler, row) == set()
    assert form.compiled.matcher is matcher, "compiled again, which would not help"
    assert form.errors == {2: "the output so far does not satisfy the grammar of the constraint"}


def test_grammar_has_precedence_over_min_tokens_and_ignored_ends(filler: MaskFiller) -> None:
    a, b = TEXTS.index("a"), TEXTS.index("b")
    form = regex_grammar("a(b|bb)?")
    few, ignoring = Stopping(9, 5, frozenset({*ENDS, b})), constraint(form, ignores_eos=True)
    assert allowed_ids(filler, make_row(constraint(form), [a])) == {b, TEXTS.index("b"), *ENDS}
    # Before min_tokens no stop token is allowed; if nothing else is, the grammar decides.
    assert allowed_ids(filler, make_row(constraint(form), [a], stopping=few)) == {b, *ENDS}
    assert allowed_ids(filler, make_row(constraint(form), [a], stopping=Stopping(9, 5, frozenset(ENDS)))) == {b}
    assert allowed_ids(filler, make_row(constraint(form), [a, b, b], stopping=few)) == ENDS
    assert allowed_ids(filler, make_row(ignoring, [a])) == {b}
    assert allowed_ids(filler, make_row(ignoring, [a, b, b])) == ENDS


def test_allowed_token_ids_narrow_the_grammar_but_not_its_end(filler: MaskFiller) -> None:
    a, b = TEXTS.index("a"), TEXTS.index("b")
    form = constraint(regex_grammar("[ab]{2}"))
    assert allowed_ids(filler, make_row(form, [], allowed_ids=frozenset({b, 30}))) == {b}
    assert allowed_ids(filler, make_row(form, [b, b], allowed_ids=frozenset({b, 30}))) == ENDS
    assert allowed_ids(filler, make_row(form, [a], allowed_ids=frozenset({30}))) == set()


def test_row_without_a_computed_mask_allows_nothing() -> None:
    row = make_row(constraint(PERSON))
    assert row.mask is not None
    assert not row.mask.any()


def test_last_token_tells_whether_the_output_is_finished(filler: MaskFiller) -> None:
    for text, is_unfinished in (("ab", False), ("a", True)):
        form = constraint(regex_grammar("ab"))
        row = make_row(form, max_tokens=len(text))
        for character in text:
            filler.fill([row])
            row.append(TEXTS.index(character))
        assert form.is_unfinished(FinishReason.LENGTH, len(text), None) is is_unfinished
    form.accepts.update({0: False, 1: True, 2: False})
    assert not form.is_unfinished(FinishReason.STOP_TOKEN, 2, 50), "the stop token is not part of the output"
    assert form.is_unfinished(FinishReason.STOP_TOKEN, 1, 50)
    assert not form.is_unfinished(FinishReason.STOP_TOKEN, 1, EOS_ID)
    assert form.is_unfinished(FinishReason.STOP_STRING, 2, None)


def test_rows_of_several_grammars_are_filled_together(filler: MaskFiller) -> None:
    forms = [PERSON, LARK, regex_grammar("[ab]+")]
    rows = [make_row(constraint(forms[i % 3])) for i in range(32)]
    ended = make_row(constraint(LARK), [EOS_ID])
    filler.start([*rows, ended])()
    for i, row in enumerate(rows):
        assert row.mask is not None
        assert set(np.flatnonzero(bits_of(row.mask, VOCABULARY_SIZE))) == allowed_ids(
            filler, make_row(constraint(forms[i % 3]))
        )


def test_lexer_that_others_have_filled_ends_no_sequence(filler: MaskFiller, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a grammar whose texts need more states than the limit together, but no single one does.
    monkeypatch.setattr(grammar_module, "parser_limits", lambda: LLParserLimits(max_lexer_states=200))
    starts = [f"{letter}{other}" for letter in "abcdef" for other in "ghijk"]
    grammar = regex_grammar("|".join(f"{start}({start}){{20}}" for start in starts))
    shared = CompiledGrammar(small_llguidance(), grammar)
    first = shared.matcher
    for start in starts:
        form = constraint(grammar, is_ready=False)
        form.compiled = shared
        row = make_row(form, [TEXTS.index(letter) for letter in start])
        for letter in start * 20:
            assert allowed_ids(filler, row) >= {TEXTS.index(letter)}
            row.append(TEXTS.index(letter))
        assert allowed_ids(filler, row) == ENDS
        assert not form.errors
    assert shared.matcher is not first


def test_grammar_that_is_too_complex_says_so(filler: MaskFiller, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = [f"{letter}{other}" for letter in "abcdef" for other in "ghijk"]
    form = constraint(regex_grammar("|".join(f"{start}({start}){{20}}" for start in starts)), is_ready=False)
    form.compiled = CompiledGrammar(small_llguidance(), form.grammar)
    few = LLParserLimits(max_lexer_states=20, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "parser_limits", lambda: few)
    form.compiled.matcher = LLMatcher(small_llguidance(), form.grammar, log_level=0, limits=few)
    assert allowed_ids(filler, make_row(form, [TEXTS.index("a")])) == set()
    assert "too complex" in str(form.errors)


def test_row_whose_masks_take_too_long_ends_and_others_go_on(
    filler: MaskFiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an ambiguous grammar, each mask of which takes longer than the one before.
    forms = [constraint(AMBIGUOUS), constraint(regex_grammar("a+"))]
    rows = [make_row(form, max_tokens=1000) for form in forms]
    monkeypatch.setattr(grammar_module, "FREE_S", 0.0)
    monkeypatch.setattr(grammar_module, "MAX_SLOW_S", 0.05)
    for _ in range(1000):
        filler.fill(rows)
        masks = [row.mask for row in rows if row.mask is not None]
        assert masks[1].any()
        if not masks[0].any():
            break
        for row in rows:
            row.append(TEXTS.index("a"))
        # The other row's masks are as fast as any, but there are many of them.
        rows[1] = make_row(forms[1], [TEXTS.index("a")])
    assert "too complex" in str(forms[0].errors)
    assert not forms[1].errors


def test_long_output_that_takes_too_long_is_not_consumed_to_its_end(
    filler: MaskFiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = constraint(AMBIGUOUS)
    monkeypatch.setattr(grammar_module, "FREE_S", 0.0)
    monkeypatch.setattr(grammar_module, "MAX_SLOW_S", 0.0)
    assert allowed_ids(filler, make_row(form, [TEXTS.index("a")] * 100_000, max_tokens=100_001)) == set()
    assert "too complex" in str(form.errors)


def test_measured_masks_are_those_of_the_others(filler: MaskFiller, monkeypatch: pytest.MonkeyPatch) -> None:
    form, other = (constraint(regex_grammar("(ab|ac)+d?")) for _ in range(2))
    outputs: list[int] = []
    monkeypatch.setattr(grammar_module, "FREE_S", -1.0)
    monkeypatch.setattr(grammar_module, "MAX_SLOW_S", float("inf"))
    for letter in "abacab":
        filler.fill([make_row(form, outputs)])  # the next one is measured
        assert allowed_ids(filler, make_row(form, outputs)) == allowed_ids(MaskFiller(1), make_row(other, outputs))
        outputs.append(TEXTS.index(letter))


def test_cache_is_bounded_by_number_and_bytes() -> None:
    cache = GrammarCache(max_grammars=3, max_bytes=100)
    for i in range(2000):
        cache.add(b"%d" % i, cast("CompiledGrammar", object()), 10 if i < 1000 else 40)
        cache.find(b"0")
        assert len(cache) <= 3
        assert cache.num_bytes <= 100
    assert cache.find(b"0") is not None, "in use"
    assert cache.find(b"5") is None
    cache.add(b"large", cast("CompiledGrammar", object()), 101)
    assert cache.find(b"large") is None
    assert len(cache) == 0 == cache.num_bytes


@pytest.fixture
def compiler() -> Any:
    made = GrammarCompiler(small_tokenizer, VOCABULARY_SIZE, [EOS_ID, OTHER_EOS_ID], GrammarCache(max_grammars=8))
    yield made
    made.close()


@pytest.mark.parametrize("num_grammars", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_text_is_compiled_once_and_grammars_do_not_pile_up(compiler: GrammarCompiler, num_grammars: int) -> None:
    form = constraint(PERSON, is_ready=False)
    first, second = compiler.compile(form), compiler.compile(form)
    assert first.result() is second.result() is compiler.compile(form).result() is compiler.find(form.key)
    with ThreadPoolExecutor(4) as threads:
        list(
            threads.map(
                lambda future: future.result(),
                [compiler.compile(constraint(regex_grammar(f"a{i}"), is_ready=False)) for i in range(num_grammars)],
            )
        )
    assert len(compiler.cache) == 8
    assert compiler.find(form.key) is None


@pytest.mark.parametrize(
    "grammar", ["", "{}", "[" * 10_000, '{"grammars": []}', regex_grammar("("), "start: undefined"]
)
def test_grammar_that_does_not_compile_is_an_error(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(GrammarError, match="cannot be compiled"):
        compiler.compile(constraint(grammar, is_ready=False)).result()
    assert compiler.compile(constraint(PERSON, is_ready=False)).result() is not None


BOMBS = (
    regex_grammar(r"((a{1,100}){1,100}){1,100}b"),
    regex_grammar(r"(.*a.{200}){10}"),
    regex_grammar(r"(\w+\s*){1,500}x"),
    schema_grammar({"type": "array", "items": {"type": "string", "maxLength": 100_000}, "maxItems": 100_000}),
    schema_grammar({"enum": [f"value {i}" for i in range(5000)]}),
    LLMatcher.grammar_from_lark('start: s\ns: s s s | s s | "a" | "aa" | ""\n'),
    LLMatcher.grammar_from_lark("start: " + "(" * 5000 + '"a"' + ")" * 5000),
)


@pytest.mark.parametrize("grammar", BOMBS, ids=range(len(BOMBS)))
def test_costly_grammar_ends_within_the_limits_or_is_refused(
    filler: MaskFiller, compiler: GrammarCompiler, grammar: str
) -> None:
    """The limits are counts, so that the test reads no clock. The suite's timeout ends it if they do not hold."""
    form, choose = constraint(grammar, is_ready=False), random.Random(0)
    try:
        form.compiled = compiler.compile(form).result()
    except GrammarError:
        return
    row = make_row(form)
    for _ in range(30):
        ids = sorted(allowed_ids(filler, row) - ENDS)
        if not ids:
            break
        row.append(choose.choice(ids))
    assert not form.errors or "too complex" in str(form.errors)


def test_model_that_cannot_be_constrained_says_why() -> None:
    def broken() -> Any:
        raise OSError("no such file")

    for load, eos, why in ((broken, [2], "no such file"), (small_tokenizer, [], "no end-of-sequence token")):
        compiler = GrammarCompiler(load, VOCABULARY_SIZE, eos)
        with pytest.raises(GrammarError, match=why):
            compiler.compile(constraint(PERSON, is_ready=False)).result()
        compiler.close()


def test_vocabulary_of_the_tokenizer_may_be_the_larger_one(filler: MaskFiller) -> None:
    small = NUM_TOKENS - 20
    compiler = GrammarCompiler(small_tokenizer, small, [EOS_ID])
    form = constraint(regex_grammar("(.|\n)+"), is_ready=False)
    form.compiled = compiler.compile(form).result()
    compiler.close()
    row = LogitsRow(Processors(), [9], 1, 50, small, Guide(form, Stopping(40, 0, frozenset({EOS_ID})), None, small))
    filler.fill([row])
    assert row.mask is not None
    assert len(row.mask) == -(-small // 32)
    assert bits_of(row.mask, small)[len(SPECIAL_IDS) :].all()


def test_interpreter_runs_while_masks_are_computed(filler: MaskFiller) -> None:
    """Other threads are not stopped: a thread that needs the interpreter gets through while a fill is under way."""
    wait = filler.start([make_row(constraint(PERSON)) for _ in range(64)])
    passed = threading.Event()
    threading.Thread(target=passed.set).start()
    assert passed.wait(60)
    wait()


@pytest.mark.slow
def test_masks_of_the_default_model_are_exact(filler: MaskFiller) -> None:
    source = resolve_model("")
    compiler = GrammarCompiler(lambda: load_tokenizer(source), SMOLLM2_VOCABULARY, sorted(ENDS))
    person = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
    for grammar in (schema_grammar(person), regex_grammar(r"[\w ]{3,9}, (é|日本|🙂)+")):
        form = constraint(grammar, is_ready=False)
        form.compiled = compiler.compile(form).result()
        arguments = Stopping(90, 0, frozenset(ENDS)), None, SMOLLM2_VOCABULARY
        row = LogitsRow(Processors(), [9], 1, 91, SMOLLM2_VOCABULARY, Guide(form, *arguments))
        reference, choose = form.compiled.matcher.deep_copy(), random.Random(1)
        for _ in range(16):
            filler.fill([row])
            assert row.mask is not None
            ids = set(np.flatnonzero(bits_of(row.mask, SMOLLM2_VOCABULARY)).tolist())
            accepted = {i for i in range(SMOLLM2_VOCABULARY) if reference.validate_tokens([i]) == 1}
            if forced := reference.compute_ff_tokens():
                # Where only one text can follow, it is written in the tokens that the tokenizer makes of it.
                assert ids == {forced[0]} <= accepted
            else:
                assert ids - ENDS == accepted - ENDS
            again = LogitsRow(
                Processors(), [9, *row.output.tolist()], 1, 91, SMOLLM2_VOCABULARY, Guide(form, *arguments)
            )
            filler.fill([again])
            assert again.mask is not None
            assert again.mask is not None
            assert row.mask is not None
            assert np.array_equal(again.mask, row.mask), "replayed at once"
            if not ids - ENDS:
                break
            row.append(choose.choice(sorted(ids - ENDS)))
            reference.consume_token(int(row.output[-1]))
    compiler.close()


@pytest.mark.parametrize("grammar", [PERSON, LARK, LIMITED, regex_grammar(r"(ab|ba)*c|[0-9]{2,4}é?")])
@pytest.mark.parametrize("seed", range(3))
def test_masks_behind_drafts_are_those_of_the_output(filler: MaskFiller, grammar: str, seed: int) -> None:
    choose = random.Random(seed)
    stopping = Stopping(200, 3, frozenset({*ENDS, TEXTS.index("b")}))
    form, other = constraint(grammar), constraint(grammar)
    row, reference = make_row(form, stopping=stopping), make_row(other, stopping=stopping)
    while reference.num_ids < 60:
        drafts, masks = [], []
        for _ in range(choose.randrange(6)):
            ids = allowed_ids(filler, reference) - ENDS
            if not ids:
                break
            drafts.append(choose.choice(sorted(ids)))
            assert reference.mask is not None
            masks.append(reference.mask.copy())
            reference.append(drafts[-1])
        wrong = [*drafts, PAD_ID, PAD_ID]
        rows = [row, *row.after(wrong)]
        filler.fill(rows)
        for found, expected in zip(rows, masks, strict=False):
            assert found.mask is not None
            assert np.array_equal(found.mask, expected)
        # Nothing that follows a refused token counts.
        assert rows[-1].mask is not None
        assert not rows[-1].mask.any()
        for draft in drafts:
            row.append(draft)
        if not allowed_ids(filler, reference) - ENDS:
            break
    assert allowed_ids(filler, row) == allowed_ids(filler, reference)
    assert form.accepts.items() >= other.accepts.items()
    assert form.errors == other.errors


def test_slow_masks_end_drafts(filler: MaskFiller, monkeypatch: pytest.MonkeyPatch) -> None:
    form = constraint(regex_grammar("a*"))
    filler.fill([make_row(form)])
    assert not form.is_slow
    monkeypatch.setattr(grammar_module, "FREE_S", -1.0)
    monkeypatch.setattr(grammar_module, "MAX_SLOW_S", 1e6)
    slow = MaskFiller(1)
    slow.fill([make_row(form, [TEXTS.index("a")])])
    slow.close()
    assert form.is_slow
