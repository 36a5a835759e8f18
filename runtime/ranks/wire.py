"""A step's layout as one row of integers, to send to another process, and back."""

from __future__ import annotations

from array import array

from ..layout import Layout, Segment, Span


def encode(layout: Layout) -> array[int]:
    """Each list with its length before it. A span that several paths share is there once, and named by its place."""
    keys: dict[int, int] = {}
    places: dict[tuple[int, int], int] = {}
    spans, paths = array("i"), array("i")
    for segment in layout.segments:
        paths.extend((segment.first_row, segment.num_rows, len(segment.path)))
        for span in segment.path:
            name = span.key, len(span.slots)
            if name not in places:
                places[name] = len(places)
                spans.extend((keys.setdefault(span.key, len(keys)), len(span.slots)))
                spans.extend(span.slots)
            paths.append(places[name])
    found = array("i")
    for rows in (layout.tokens, layout.positions, layout.write_slots, layout.logit_rows):
        found.append(len(rows))
        found.extend(rows)
    found.append(len(places))
    found.extend(spans)
    found.append(len(layout.segments))
    found.extend(paths)
    return found


def decode(values: array[int]) -> Layout:
    """The layout, as far as a model needs it: without `logit_of`, which is for those who asked."""
    at = 0

    def take(count: int) -> array[int]:
        nonlocal at
        at += count
        return values[at - count : at]

    def next_one() -> int:
        return take(1)[0]

    tokens, positions, write_slots, logit_rows = (take(next_one()) for _ in range(4))
    spans = []
    for _ in range(next_one()):
        key = next_one()
        spans.append(Span(key, take(next_one())))
    segments = []
    for _ in range(next_one()):
        first_row, num_rows, length = take(3)
        segments.append(Segment(first_row, num_rows, tuple(spans[place] for place in take(length))))
    return Layout(tokens, positions, write_slots, tuple(segments), logit_rows, array("i"))
