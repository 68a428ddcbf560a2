"""How payloads are shown: nothing in them becomes markup, and what is hidden stays hidden."""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.console import charts, show
from flowfabric.console.paper import templates
from flowfabric.server.security.console_session import form_token
from tests.console.sample import HOSTILE

TEXTS = st.text() | st.sampled_from([HOSTILE, "</pre>", "\u2066", "\x00", "&lt;", "]]>", "'\"", "{{x}}"])


@given(st.recursive(TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)))
def test_no_payload_can_leave_its_element(value: Any) -> None:
    shown = show.payload("result", msgspec.json.encode(value), redact=None, hide=False)
    html = templates().from_string("<pre>{{ shown.text }}</pre>").render(shown=shown)
    assert html.count("<") == 2
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", html)


@given(st.binary(max_size=400))
def test_any_bytes_can_be_shown(data: bytes) -> None:
    shown = show.payload("result", data, redact=None, hide=False)
    assert shown is not None
    assert shown.bytes == len(data)


def test_a_large_payload_is_cut_and_a_hidden_or_redacted_one_is_not_shown() -> None:
    large = show.payload("input", b'"' + b"x" * 100_000 + b'"', redact=None, hide=False)
    assert large is not None
    assert large.is_cut
    assert len(large.text) <= show.MAX_SHOWN_BYTES
    hidden = show.payload("input", b'"secret"', redact=None, hide=True)
    assert hidden is not None
    assert "secret" not in hidden.text
    redacted = show.payload("input", b'"secret"', redact=lambda kind, data: b'"***"', hide=False)
    assert redacted is not None
    assert redacted.text == '"***"'


def test_the_token_of_a_form_is_good_for_its_session_and_path_only() -> None:
    assert form_token("a" * 32, "/ui/x") != form_token("b" * 32, "/ui/x")
    assert form_token("a" * 32, "/ui/x") != form_token("a" * 32, "/ui/y")


KINDS = st.sampled_from([{}, {"is_idle": True}, {"is_whole": True}])
SPANS = st.tuples(st.integers(0, 10**12), st.integers(0, 10**9), KINDS)


@given(st.lists(SPANS, min_size=1, max_size=60))
def test_a_waterfall_keeps_the_order_of_instants_and_stays_within_its_width(
    spans: list[tuple[int, int, dict[str, bool]]],
) -> None:
    bars = [charts.Bar("b", begin, begin + took, "ok", **kind) for begin, took, kind in spans]
    scale = charts.Scale(bars)
    instants = sorted({instant for bar in bars for instant in (bar.begin, bar.end)})
    places = [scale.x(instant) for instant in instants]
    assert all(first <= second + 1e-6 for first, second in itertools.pairwise(places))
    assert places[0] >= -1e-6
    assert places[-1] <= charts.WIDTH + 1e-6


def test_an_idle_stretch_is_folded() -> None:
    bars = [charts.Bar("a", 0, 1000, "ok"), charts.Bar("b", 7_200_000, 7_201_000, "ok")]
    rows, folds = charts.waterfall(bars)
    assert folds == [7_199_000]
    assert len(rows) == 2


def test_a_wait_within_an_attempt_is_folded_and_what_happens_beside_it_is_not() -> None:
    attempt = charts.Bar("attempt", 0, 7_202_000, "ok", is_whole=True)
    wait = charts.Bar("wait", 1000, 7_201_000, "hold", is_idle=True)
    step = charts.Bar("step", 3_000_000, 3_001_000, "ok")
    assert charts.waterfall([attempt, wait])[1] == [7_200_000]
    assert charts.waterfall([attempt, wait, step])[1] == [2_999_000, 4_200_000]


def test_a_wait_that_is_still_open_is_folded_too() -> None:
    attempt = charts.Bar("attempt", 0, 1000, "hold", is_whole=True)
    wait = charts.Bar("wait", 1000, 86_401_000, "hold", is_idle=True)
    assert charts.waterfall([attempt, wait])[1] == [86_400_000]
