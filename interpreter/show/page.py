"""A state as HTML: no script, no asset, all text escaped; light or dark as its reader is."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..session import Usage
from ..transcript import Transcript
from .spans import Deeper, Fork, Plain, Role, Story, Written, hover, tell

LIGHT = (
    "--ink:#1f2328;--faint:#68717b;--line:#d5dbe1;--turn:#f6f8fa;--chip:#e8edf3;"
    "--cached:#d3e5fb;--computed:#fdeab8;--forced:#dcd3f7;--sampled:#cdeed4;--chosen:#f5d3e8;--failed:#ffd7d5"
)
DARK = (
    "--ink:#e6edf3;--faint:#9198a1;--line:#3d444d;--turn:#161b22;--chip:#2b333d;"
    "--cached:#1b3a5f;--computed:#57430c;--forced:#40306f;--sampled:#19482a;--chosen:#5c2348;--failed:#67211d"
)
STYLE = f"""
.bw-state{{{LIGHT};color:var(--ink);font:14px/1.65 system-ui,sans-serif;max-width:1100px}}
@media(prefers-color-scheme:dark){{.bw-state{{{DARK}}}}}
[data-jp-theme-light="true"] .bw-state,.vscode-light .bw-state{{{LIGHT}}}
[data-jp-theme-light="false"] .bw-state,.vscode-dark .bw-state{{{DARK}}}
.bw-state .text{{white-space:pre-wrap;overflow-wrap:anywhere}}
.bw-state .turn{{border-left:3px solid var(--line);background:var(--turn);border-radius:0 8px 8px 0;
padding:5px 12px 7px;margin:6px 0}}
.bw-state .role{{font-size:11px;font-weight:600;letter-spacing:.04em;color:var(--faint);display:block}}
.bw-state .t{{border-radius:3px;padding:1px 0}}.bw-state .t:hover{{outline:1px solid var(--faint)}}
.bw-state .cached{{background:var(--cached)}}.bw-state .computed{{background:var(--computed)}}
.bw-state .forced{{background:var(--forced)}}.bw-state .sampled{{background:var(--sampled)}}
.bw-state .chosen{{background:var(--chosen)}}
.bw-state .sampled.t+.sampled.t,.bw-state .forced.t+.forced.t{{margin-left:1px}}
.bw-state .chip{{font:11px/1.5 ui-monospace,Menlo,Consolas,monospace;background:var(--chip);
border:1px solid var(--line);border-radius:9px;padding:0 7px;margin:0 4px 0 2px;white-space:nowrap}}
.bw-state .failed{{background:var(--failed)}}
.bw-state .fork{{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:10px;margin:8px 0}}
.bw-state .fork>details{{border:1px solid var(--line);border-radius:8px;padding:4px 12px 8px;min-width:0}}
.bw-state summary{{font-size:11px;color:var(--faint);cursor:pointer}}
.bw-state .sum{{color:var(--faint);font-size:12px;border-top:1px solid var(--line);margin-top:10px;padding-top:5px}}
.bw-state .sum span{{white-space:nowrap}}
.bw-state .sum i{{display:inline-block;width:11px;height:11px;border-radius:3px;margin:0 5px -1px 12px}}
.bw-state .values{{margin:6px 0;overflow-wrap:anywhere}}
"""
ORIGINS = ("cached", "computed", "forced", "sampled", "chosen")


def as_html(transcript: Transcript) -> str:
    """All that is written by now, done or not; waits for nothing."""
    story = tell(transcript)
    legend = " ".join(f'<span><i class="{origin}"></i>{origin}</span>' for origin in ORIGINS)
    body = "".join(_story(story))
    return (
        f'<div class="bw-state"><style>{STYLE}</style>{body}'
        f'<div class="sum">{escape(summary(story))}{legend}</div></div>'
    )


def summary(story: Story) -> str:
    """What the calls of a story and its branches took, on one line."""
    total = Usage(
        sum(u.prompt_tokens for u in story.usages),
        sum(u.hit_tokens for u in story.usages),
        sum(u.completion_tokens for u in story.usages),
        sum(u.forced_tokens for u in story.usages),
    )
    calls, computed = len(story.usages), total.prompt_tokens - total.hit_tokens
    return (
        f"{calls} generation{'' if calls == 1 else 's'} · prompts: {total.prompt_tokens} tokens, "
        f"{total.hit_tokens} hit, {computed} computed · {total.completion_tokens} generated, "
        f"{total.forced_tokens} forced · {story.seconds:.2f} s"
    )


def _story(story: Story) -> Iterator[str]:
    inside = False
    yield '<div class="text">'
    for span in story.spans:
        match span:
            case Role(None):
                yield "</div>" if inside else ""
                inside = False
            case Role(name):
                yield f'<div class="turn"><span class="role">{escape(str(name))}</span>'
                inside = True
            case Plain(parts):
                for text, origin in parts:
                    hint = origin or "not computed yet, or not known"
                    yield f'<span class="t {origin or ""}" title="{hint}">{escape(text)}</span>'
            case Written():
                yield _written(span)
            case Fork(branches):
                yield '<div class="fork">'
                for number, branch in enumerate(branches):
                    yield f"<details open><summary>branch {number}</summary>{''.join(_story(branch))}</details>"
                yield "</div>"
            case Deeper(count):
                yield f'<div class="role">{count} more branches, too deep to show</div>'
    yield "</div></div>" if inside else "</div>"
    if story.values:
        chips = " ".join(
            f'<span class="chip">{escape(name)}</span>{escape(_short(value))}' for name, value in story.values.items()
        )
        yield f'<div class="values">{chips}</div>'


def _written(call: Written) -> str:
    kind = "chip failed" if call.state == "failed" else "chip"
    label = (call.name or "gen") + {"running": " …", "failed": " failed"}.get(call.state, "")
    chip = f'<span class="{kind}" title="{escape(call.note)}">{escape(label)}</span>'
    tokens = "".join(
        f'<span class="t {piece.origin or ""}" title="{escape(hover(piece))}">{escape(piece.text)}</span>'
        for piece in call.pieces
    )
    failed = f'<div class="failed">{escape(call.note)}</div>' if call.state == "failed" else ""
    others = "".join(f"<div>{escape(text)}</div>" for text in call.others)
    folded = f"<details><summary>{len(call.others)} more samples</summary>{others}</details>" if others else ""
    return f"{chip}{tokens}{failed}{folded}"


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
