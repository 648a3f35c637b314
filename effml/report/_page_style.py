"""The style sheet of the HTML page: light and dark, phone and desk, screen and paper."""

from __future__ import annotations

__all__ = ["CSS"]

CSS = """
:root {
  --ground: #fbfbfa; --card: #ffffff; --text: #1c1f23; --muted: #59616c; --line: #e0e3e8;
  --accent: #0b5cad; --good: #0a7a4b; --bad: #b3261e; --good-ground: #e6f4ed; --bad-ground: #fbeae9;
  --code: #f2f3f5;
  color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171b; --card: #1b1f24; --text: #e4e7eb; --muted: #9da5b0; --line: #2d333b;
    --accent: #7db7f0; --good: #5fcf9c; --bad: #ff8f85; --good-ground: #16352a; --bad-ground: #41201e;
    --code: #20252b;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: clamp(1.25rem, 4vw, 3rem) clamp(1rem, 4vw, 2rem) 4rem; max-width: 54rem;
  background: var(--ground); color: var(--text); overflow-wrap: break-word;
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
}
h1, h2 { line-height: 1.25; text-wrap: balance; letter-spacing: -0.01em; }
h1 { margin: 0 0 0.5rem; font-size: clamp(1.6rem, 1.2rem + 2vw, 2.2rem); }
h2 { margin: 2.75rem 0 0.75rem; font-size: 1.3rem; }
p { margin: 0 0 1rem; max-width: 42rem; }
a { color: var(--accent); }
.summary { color: var(--muted); font-size: 1.1rem; line-height: 1.5; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; margin: 1.25rem 0 0; padding: 0.75rem 0;
  list-style: none; border: solid var(--line); border-width: 1px 0; font-size: 0.9rem; }
nav a { display: inline-block; padding: 0.15rem 0; text-decoration: none; }
nav a:hover { text-decoration: underline; }
.claim { margin: 2rem 0 0; padding: 1rem 1.25rem; background: var(--card); border: 1px solid var(--line);
  border-left: 4px solid var(--accent); border-radius: 6px; }
.claim h2 { margin: 0 0 0.35rem; font-size: 0.8rem; letter-spacing: 0.06em; text-transform: uppercase;
  color: var(--muted); }
.claim p { margin: 0 0 0.5rem; font-size: 1.05rem; }
.claim p:last-child { margin-bottom: 0; }
.metrics { display: grid; gap: 0.75rem; margin: 0 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 11rem), 1fr)); }
.metric { padding: 0.9rem 1.1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
.metric p { margin: 0; }
.metric .label, .metric .note { color: var(--muted); font-size: 0.875rem; line-height: 1.4; }
.metric .value { margin: 0.15rem 0; font-size: 1.45rem; font-weight: 650; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.metric.good .value { color: var(--good); }
.metric.bad .value { color: var(--bad); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); }
.scroll:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
table { width: 100%; border-collapse: collapse; font-size: 0.925rem; line-height: 1.4; }
th, td { padding: 0.5rem 0.5rem; text-align: left; vertical-align: baseline;
  border-top: 1px solid var(--line); min-width: 4rem; max-width: 22rem; overflow-wrap: normal; }
thead th { border-top: 0; color: var(--muted); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--card); min-width: 0;
  max-width: 9rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
td strong { color: var(--good); }
.checks { margin: 0 0 1.5rem; padding: 0; list-style: none; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; }
.checks li { display: flex; flex-wrap: wrap; gap: 0.3rem 0.9rem; align-items: baseline;
  padding: 0.7rem 0.9rem; }
.checks li + li { border-top: 1px solid var(--line); }
.verdict { flex: 0 0 auto; padding: 0.05rem 0.6rem; border-radius: 999px;
  font-size: 0.85rem; font-weight: 600; }
.verdict.good { color: var(--good); background: var(--good-ground); }
.verdict.bad { color: var(--bad); background: var(--bad-ground); }
.what { flex: 1 1 16rem; min-width: 0; }
.detail { display: block; color: var(--muted); font-size: 0.875rem; }
figure { margin: 0 0 1.75rem; }
figure img { display: block; width: 100%; max-width: 40rem; height: auto; padding: 0.5rem;
  background: #ffffff; border: 1px solid var(--line); border-radius: 8px; }
figcaption { margin: 0.5rem 0 0; max-width: 42rem; color: var(--muted);
  font-size: 0.9rem; line-height: 1.45; }
.code figcaption, .table figcaption { margin: 0 0 0.4rem; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
code { font-size: 0.9em; }
:not(pre) > code { padding: 0.05em 0.3em; background: var(--code); border-radius: 4px; }
pre { margin: 0; padding: 0.9rem 1.1rem; font-size: 0.85rem; line-height: 1.5; background: var(--code);
  border: 1px solid var(--line); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; tab-size: 4; }
footer { margin-top: 3.5rem; padding-top: 1.25rem; border-top: 1px solid var(--line); color: var(--muted);
  font-size: 0.875rem; }
footer h2 { margin: 0 0 0.75rem; font-size: 1rem; }
dl { display: grid; grid-template-columns: minmax(5rem, auto) 1fr; gap: 0.3rem 1.25rem; margin: 0; }
dt { font-weight: 600; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
@media (min-width: 40rem) {
  .verdict { min-width: 9rem; text-align: center; }
}
@media (max-width: 30rem) {
  figure img { padding: 0.15rem; border-radius: 4px; }
  th, td { padding: 0.45rem 0.5rem; }
}
@media print {
  :root { --ground: #ffffff; --card: #ffffff; --text: #000000; --muted: #444444; --line: #bbbbbb;
    --code: #ffffff; --accent: #000000; --good: #0a7a4b; --bad: #b3261e; --good-ground: #ffffff;
    --bad-ground: #ffffff; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  h2, .table figcaption, .code figcaption { break-after: avoid; }
  figure, .metric, .checks li, tr, .claim { break-inside: avoid; }
  figure.code, figure.table { break-inside: auto; }
  .scroll { overflow: visible; }
  table { font-size: 8.5pt; }
  th, td { min-width: 0; padding: 0.2rem 0.4rem; }
}
"""
