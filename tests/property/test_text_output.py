"""Streamed output is the whole text, cut once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.router.text.output import OutputText
from tests.support.examples import examples
from tests.support.text import text_models
from tests.support.text.text_models import text_model

ENDING_ID = 2  # <|im_end|>
# Ids of single bytes, of common words, and special ones.
IDS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2000)), max_size=30)


@settings(max_examples=examples(300), deadline=None)
@given(
    ids=IDS,
    text=st.text("ab \n🦙é", max_size=20),
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), max_size=4),
    cuts=st.lists(st.integers(0, 1000), max_size=6),
    min_tokens=st.integers(0, 12),
    include_stop=st.booleans(),
)
def test_text_is_the_whole_text_cut_at_the_first_stop_that_counts(
    ids: list[int],
    text: str,
    spans: list[tuple[int, int]],
    cuts: list[int],
    min_tokens: int,
    include_stop: bool,
) -> None:
    model = text_model(text_models.smollm2)
    ids = model.encode(text) + ids
    whole = model.decode(ids)
    stops = [stop for start, length in spans if (stop := whole[start : start + length])]
    output = OutputText(model.detokenizer(), stops=stops, include_stop=include_stop, min_tokens=min_tokens)

    ends = sorted(cut % (len(ids) + 1) for cut in cuts)
    sent, matched, num_taken = "", None, 0
    for start, end in zip([0, *ends], [*ends, len(ids)], strict=True):
        step = output.feed(start, ids[start:end])
        sent, matched, num_taken = sent + step.text, step.matched, num_taken + step.num_tokens
        if matched is not None:
            break
    last = output.finish()
    sent, matched = sent + last.text, matched or last.matched

    # What each token completed, and where in the text a stop may end.
    detokenizer = model.detokenizer()
    completed = [detokenizer.push([token_id]) for token_id in ids]
    completed.append(detokenizer.flush())
    token_of = [min(i + 1, len(ids)) for i, part in enumerate(completed) for _ in part]
    for end in range(1, len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found and token_of[end - 1] > min_tokens:
            longest = max(found, key=len)
            assert (matched, num_taken) == (longest, token_of[end - 1])
            assert sent == whole[: end if include_stop else end - len(longest)]
            return
    assert (sent, matched, num_taken) == (whole, None, len(ids))


@settings(max_examples=examples(100), deadline=None)
@given(ids=IDS, split=st.integers(0, 100))
def test_ending_token_adds_no_text(ids: list[int], split: int) -> None:
    model = text_model(text_models.smollm2)
    whole = [*ids, ENDING_ID]
    start = split % len(whole)
    output = OutputText(model.detokenizer())
    first = output.feed(0, whole[:start])
    second = output.feed(start, whole[start:], last_is_stop_token=True)
    assert first.text + second.text + output.finish().text == model.decode(ids)
    assert first.num_tokens + second.num_tokens == len(whole)
