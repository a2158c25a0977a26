"""The style sheet of the report: one column on a phone, light or dark as the reader's system is."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf7; --card: #ffffff; --ink: #1d2125; --soft: #5d656c; --line: #e3e0d9;
  --grid: #ece9e2; --band: #2f855a1f; --good: #1f7a4d; --bad: #b23a2a; --neutral: #8a6410;
  --s0: #1f5f8b; --s1: #c2571a; --s2: #6b4fa0; --s3: #2b7a5b; --s4: #a83265; --s5: #7a6a1c;
  --quote: #f4f2ec; --gone: #b23a2a1f; --new: #1f7a4d24;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --card: #1b1f23; --ink: #e6e4df; --soft: #9ba3a9; --line: #2d3338;
    --grid: #282d32; --band: #4fb98524; --good: #5cc48f; --bad: #f0806e; --neutral: #dcae4f;
    --s0: #6cb4e4; --s1: #f0995c; --s2: #b59ae6; --s3: #6fce9f; --s4: #ee87b0; --s5: #d5c067;
    --quote: #22272c; --gone: #f0806e30; --new: #5cc48f30;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
    "DejaVu Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 20px 64px; }
h1, h2, h3, p, figure, dl, dd { margin: 0; }
h2 { font-size: 20px; font-weight: 650; margin: 56px 0 4px; letter-spacing: -0.01em; }
.lead { color: var(--soft); max-width: 68ch; margin-bottom: 18px; font-size: 15px; }
code, pre, .mono {
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.overline { color: var(--soft); font-size: 14px; display: flex; flex-wrap: wrap; gap: 4px 14px; }
.overline strong { color: var(--ink); font-weight: 650; }
.status { padding: 0 8px; border: 1px solid currentColor; border-radius: 99px; font-size: 13px; }
.hero { margin-top: 26px; }
.figure {
  font-size: clamp(52px, 13vw, 104px); line-height: 1; font-weight: 680; letter-spacing: -0.035em;
  font-variant-numeric: tabular-nums; display: block;
}
.caption { font-size: 17px; color: var(--soft); margin-top: 8px; }
.sentence { font-size: 23px; font-weight: 500; line-height: 1.35; margin-top: 20px; max-width: 34em;
  letter-spacing: -0.01em; text-wrap: balance; }
.good { color: var(--good); } .bad { color: var(--bad); } .neutral { color: var(--neutral); }
.undecided { color: var(--soft); }
p.figure.neutral { color: var(--ink); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(172px, 1fr));
  margin-top: 32px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  overflow: hidden; }
.facts div { box-shadow: 1px 0 0 var(--line), 0 1px 0 var(--line); padding: 13px 16px 12px; }
.facts dt { color: var(--soft); font-size: 13.5px; }
.facts dd { font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums;
  letter-spacing: -0.01em; overflow-wrap: anywhere; }
.facts small { display: block; color: var(--soft); font-size: 13px; font-weight: 400;
  letter-spacing: 0; }
.gates { list-style: none; margin: 14px 0 0; padding: 0; border-top: 1px solid var(--line); }
.gates li { display: grid; grid-template-columns: 104px minmax(120px, 220px) 1fr; gap: 2px 16px;
  padding: 11px 0; border-bottom: 1px solid var(--line); align-items: baseline; }
.gates b { font-weight: 600; overflow-wrap: anywhere; }
.gates .word { font-weight: 650; }
.gates p { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(310px, 100%), 1fr));
  gap: 14px; margin-top: 14px; }
.charts.two { grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
.chart .dot-name { fill: var(--ink); }
.chart .dot-name, .chart .on-axis { paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
.chart.parallel .on-axis { stroke: var(--paper); }
.axis { stroke: var(--line); stroke-width: 1.5; }
.figure.small { font-size: clamp(30px, 6vw, 56px); letter-spacing: -0.02em; }
.charts.one { grid-template-columns: minmax(0, 430px); }
.charts figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 13px 14px 8px; }
figcaption { display: grid; grid-template-columns: 1fr auto; column-gap: 12px;
  align-items: baseline; margin-bottom: 6px; }
figcaption b { font-weight: 620; font-size: 15px; line-height: 1.3; }
figcaption .now { font-weight: 620; font-variant-numeric: tabular-nums; white-space: nowrap; }
figcaption .key { grid-column: 1 / -1; color: var(--soft); font-size: 12.5px; }
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart .tick { text-anchor: end; } .chart .note { text-anchor: end; }
.grid { stroke: var(--grid); stroke-width: 1; }
.band { fill: var(--band); }
.reference { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 1.9; stroke-linejoin: round; stroke-linecap: round; }
.faint { fill: none; stroke-width: 1; opacity: 0.32; stroke-linejoin: round; }
polyline.s0 { stroke: var(--s0); } polyline.s1 { stroke: var(--s1); }
polyline.s2 { stroke: var(--s2); } polyline.s3 { stroke: var(--s3); }
polyline.s4 { stroke: var(--s4); } polyline.s5 { stroke: var(--s5); }
circle.s0 { fill: var(--s0); } circle.s1 { fill: var(--s1); } circle.s2 { fill: var(--s2); }
circle.s3 { fill: var(--s3); } circle.s4 { fill: var(--s4); } circle.s5 { fill: var(--s5); }
circle.dot { opacity: 0.55; }
.s0t { color: var(--s0); } .s1t { color: var(--s1); } .s2t { color: var(--s2); }
.s3t { color: var(--s3); } .s4t { color: var(--s4); } .s5t { color: var(--s5); }
.legend { margin-right: 10px; white-space: nowrap; }
details { margin-top: 16px; }
summary { cursor: pointer; color: var(--soft); padding: 6px 0; }
summary:hover { color: var(--ink); }
.samples { display: grid; gap: 14px; margin-top: 14px; }
.samples.ends { grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); }
.sample { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 15px 18px 16px; }
.prompt { font-weight: 600; }
.tag { color: var(--soft); font-size: 13px; margin-top: 2px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(290px, 100%), 1fr));
  gap: 10px 18px; margin-top: 11px; }
.answer { border-left: 3px solid var(--line); padding: 2px 0 2px 13px; min-width: 0; }
.answer.now { border-left-color: var(--s0); }
.answer h3 { font-size: 13px; font-weight: 500; color: var(--soft); margin-bottom: 3px; }
.free { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
del, ins { text-decoration: none; border-radius: 3px; padding: 0 1px; }
del { background: var(--gone); } ins { background: var(--new); }
.domains { margin: 14px 0 0; display: grid; gap: 7px; max-width: 720px; }
.domains div { display: grid; grid-template-columns: minmax(84px, 150px) 1fr 74px; gap: 12px;
  align-items: center; }
.domains dt { overflow-wrap: anywhere; }
.domains dd.rate { text-align: right; font-variant-numeric: tabular-nums; font-weight: 600; }
.bar { position: relative; height: 16px; background: var(--quote); border-radius: 5px; }
.bar i { position: absolute; inset: 0 auto 0 0; border-radius: 5px; background: var(--good);
  opacity: 0.78; }
.bar i.bad { background: var(--bad); } .bar i.undecided { background: var(--soft); }
.bar b { position: absolute; top: -3px; bottom: -3px; left: 50%; width: 1px;
  background: var(--soft); }
.bar u { position: absolute; top: 7px; height: 2px; background: var(--ink); opacity: 0.75; }
.wide { overflow-x: auto; margin-top: 14px; }
table { border-collapse: collapse; font-size: 14.5px; font-variant-numeric: tabular-nums;
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; min-width: 100%; }
th, td { text-align: left; padding: 8px 14px; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td { max-width: 34ch; overflow-wrap: break-word; }
td.name { white-space: nowrap; max-width: none; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; font-size: 13px; vertical-align: bottom; }
td.was { color: var(--soft); }
td.num, th.num { text-align: right; }
td.num { white-space: nowrap; }
tr.chosen td { background: var(--new); }
.empty { color: var(--soft); font-style: italic; }
.times { display: flex; height: 30px; border-radius: 7px; overflow: hidden; margin-top: 16px;
  gap: 2px; }
.times i { display: block; min-width: 2px; }
.t0 { background: var(--s0); } .t1 { background: var(--s1); } .t2 { background: var(--s2); }
.t3 { background: var(--s3); } .t4 { background: var(--s4); } .t5 { background: var(--s5); }
.times .rest, .key-list .rest { background: var(--soft); opacity: 0.45; }
.key-list { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 26px; margin: 11px 0 0;
  padding: 0; font-size: 15px; }
.key-list i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 7px; }
.key-list span { color: var(--soft); }
.settings { display: grid; grid-template-columns: minmax(96px, max-content) 1fr; gap: 5px 24px;
  margin-top: 14px; font-size: 15px; }
.settings dt { color: var(--soft); } .settings dd { overflow-wrap: anywhere; }
pre { background: var(--quote); padding: 14px 16px; border-radius: 8px; overflow-x: auto;
  font-size: 13px; line-height: 1.5; margin: 8px 0 0; }
footer { color: var(--soft); font-size: 13.5px; margin-top: 56px; border-top: 1px solid var(--line);
  padding-top: 14px; overflow-wrap: anywhere; }
@media (max-width: 560px) {
  main { padding: 26px 16px 48px; }
  .sentence { font-size: 20px; }
  h2 { margin-top: 44px; }
  .facts { grid-template-columns: 1fr 1fr; }
  .gates li { grid-template-columns: 88px 1fr; } .gates p { grid-column: 1 / -1; }
  .sample { padding: 13px 14px 14px; }
  .domains div { grid-template-columns: 88px 1fr 66px; gap: 8px; }
}
@media print { .charts figure, .sample { break-inside: avoid; } }
""".strip()
