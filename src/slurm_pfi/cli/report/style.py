"""The style of the page: light and dark, wide and narrow. Colours after Okabe and Ito, for the colour-blind too."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { --paper: #ffffff; --ink: #1b1b1b; --soft: #585858; --rule: #dcdcdc; --shade: #eaf1f7; --release: #f6efdf;
  --draw: #0072b2; --limit: #b84300; --caps: #6b6b6b; --share: #1b1b1b; --warn: #fff3d6; --bar: #9cc6e3; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e9e9e9; --soft: #aab0b6; --rule: #3a4148;
  --shade: #1d2932; --release: #2e2818; --draw: #56b4e9; --limit: #f2a14e; --caps: #a3a9af; --share: #e9e9e9;
  --warn: #3a3016; --bar: #2f5f80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1072px; margin: 0 auto; padding: 20px 16px 48px; overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 8px; }
p { margin: 8px 0; max-width: 78ch; }
.when, .how, footer, .none { color: var(--soft); }
.how, footer { font-size: 13px; }
.verdict { font-size: 18px; line-height: 1.4; margin: 16px 0; }
.warn { background: var(--warn); padding: 8px 12px; border-radius: 4px; max-width: none; }
.tiles { display: grid; grid-template-columns: repeat(6, 1fr); gap: 1px; margin: 20px 0 0; background: var(--rule);
  border: 1px solid var(--rule); }
.tile { background: var(--paper); padding: 10px 12px; }
.tile dt { color: var(--soft); font-size: 13px; }
.tile dd { margin: 0; font-size: 21px; font-variant-numeric: tabular-nums; }
.tile small { display: block; font-size: 12px; line-height: 1.35; color: var(--soft); }
ul.said { padding-left: 18px; max-width: 84ch; } ul.said li { margin: 4px 0; }
ul.key { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 4px 0; padding: 0; font-size: 13px;
  color: var(--soft); }
.swatch { width: 26px; height: 10px; margin-right: 6px; vertical-align: middle; }
svg { display: block; } .swatch { display: inline-block; }
.site-chart { width: 100%; height: auto; } .narrow { display: none; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.y, svg text.unit { text-anchor: end; } svg text.x, svg text.phase, svg text.none { text-anchor: middle; }
svg text.first { text-anchor: start; } svg text.last { text-anchor: end; }
svg text.limit-name { fill: var(--limit); font-weight: 600; }
svg path { fill: none; stroke-linejoin: round; } .grid, .axis { stroke: var(--rule); } .axis { stroke: var(--soft); }
.shade { fill: var(--shade); } .release { fill: var(--release); }
path.draw { stroke: var(--draw); stroke-width: 1.6; } path.limit { stroke: var(--limit); stroke-width: 2.4; }
path.caps { stroke: var(--caps); stroke-width: 1.4; stroke-dasharray: 5 3; }
path.hold { stroke: var(--limit); stroke-width: 1.6; stroke-dasharray: 2 3; }
path.counts { stroke: var(--ink); stroke-dasharray: 1 3; } path.base { stroke: var(--soft); stroke-dasharray: 2 3; }
path.share { stroke: var(--share); stroke-width: 1.6; } .run-chart path.limit { stroke-width: 1.6; }
.run-chart path.draw { stroke-width: 1.2; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; font-size: 13px; color: var(--soft); border-bottom: 1px solid var(--soft);
  vertical-align: bottom; }
th, td { padding: 5px 12px 5px 0; } td { border-bottom: 1px solid var(--rule); vertical-align: top; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.num { white-space: normal; overflow-wrap: normal; } .rest td { font-style: italic; color: var(--soft); }
.sub { display: block; font-size: 12px; line-height: 1.3; color: var(--soft); } .note { color: var(--limit); }
.bar { display: block; height: 4px; margin: 2px 0 0 auto; background: var(--bar); }
.events td:nth-child(2) { white-space: nowrap; } .events th.num, .events td.num { text-align: left; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(290px, 1fr)); gap: 18px 24px; margin: 8px 0; }
figure { margin: 0; } figcaption { font-size: 13px; } .run-chart { width: 100%; max-width: 360px; height: auto; }
footer { margin-top: 40px; border-top: 1px solid var(--rule); padding-top: 8px; }
@media (max-width: 900px) { .tiles { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 640px) { .wide { display: none; } .narrow { display: block; } .less { display: none; }
  .tiles { grid-template-columns: repeat(2, 1fr); } h1 { font-size: 22px; } .verdict { font-size: 16px; }
  main { padding: 14px 12px 32px; } th, td { padding-right: 8px; } table { font-size: 13px; } }
@media print { body { font-size: 11px; } .scroll { overflow: visible; } }
"""
