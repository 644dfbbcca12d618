"""How the report looks, and the little script that it can do without."""

from __future__ import annotations

SHADES = 16
# Light to dark, each step darker than the one before: read alike with any colour vision and
# in grey. On a dark page the order is reversed, so that high errors stand out on both.
_RAMP = ((253, 240, 196), (250, 190, 98), (232, 110, 66), (170, 38, 98), (84, 18, 98), (36, 10, 58))


def _shade(share: float) -> str:
    place = share * (len(_RAMP) - 1)
    index = min(int(place), len(_RAMP) - 2)
    pair = zip(_RAMP[index], _RAMP[index + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - index)):02x}" for a, b in pair)


def _shades(first: float, last: float) -> str:
    steps = [first + (last - first) * step / (SHADES - 1) for step in range(SHADES)]
    return "".join(f".c{step}{{fill:{_shade(share)}}}" for step, share in enumerate(steps))


_LIGHT = """
:root{color-scheme:light;--page:#f4f5f8;--card:#fff;--ink:#151922;--soft:#59616f;--line:#dde1e8;
--faint:#eef0f4;--accent:#3450c8;--pass:#0a7548;--pass-bg:#e4f4ec;--fail:#b4231a;--fail-bg:#fdeceb;
--s0:#2456b8;--s1:#c45a00;--s2:#00785a;--s3:#9b2f86;--s4:#7a6a00;--s5:#4b5563;
--zero:#b4cfee;--hatch:#9aa3b1;--hatch-bg:#e3e6eb;--mark:#ffe3a3}
"""
_DARK = """
:root{color-scheme:dark;--page:#0d1015;--card:#151a21;--ink:#e7eaf0;--soft:#9aa4b3;--line:#2b323d;
--faint:#1d232c;--accent:#93a9ff;--pass:#52c795;--pass-bg:#0f2a1f;--fail:#ff8d83;--fail-bg:#331614;
--s0:#7fb0ff;--s1:#ffa94d;--s2:#4fd1a5;--s3:#f08fd8;--s4:#e0d060;--s5:#b4bdca;
--zero:#35608f;--hatch:#7c8898;--hatch-bg:#323a46;--mark:#5c4510}
"""
_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,.top,footer{max-width:1180px;margin:0 auto;padding:0 24px}
.top{display:flex;align-items:baseline;gap:12px;padding-top:24px;padding-bottom:14px;
color:var(--soft)}
.top strong{color:var(--ink);font-size:17px;letter-spacing:-.01em}
.top span:last-child{margin-left:auto}
section>:last-child{margin-bottom:0}
section,.verdict{background:var(--card);border:1px solid var(--line);border-radius:14px;
padding:26px 28px;margin:0 0 20px}
.verdict{padding:30px 28px 26px;border-top:5px solid var(--soft)}
.verdict.pass{border-top-color:var(--pass)}.verdict.fail{border-top-color:var(--fail)}
.verdict header{display:flex;gap:20px;align-items:center}
.verdict header svg{flex:none;width:60px;height:60px}
.badge{fill:var(--faint)}.pass .badge{fill:var(--pass-bg)}.fail .badge{fill:var(--fail-bg)}
.glyph{fill:none;stroke:var(--soft);stroke-width:4;stroke-linecap:round;stroke-linejoin:round}
.pass .glyph{stroke:var(--pass)}.fail .glyph{stroke:var(--fail)}
h1{font-size:31px;line-height:1.15;letter-spacing:-.02em;margin:0 0 5px;font-weight:680}
h2{font-size:20px;letter-spacing:-.01em;margin:0 0 4px;font-weight:650;display:flex;gap:12px;
align-items:center;flex-wrap:wrap}
h3{font-size:15px;margin:26px 0 6px;font-weight:650}
p{margin:0 0 12px;max-width:82ch}.soft,.lead{color:var(--soft)}.lead{margin-bottom:18px}
.verdict p{margin:0;color:var(--soft);font-size:16px}
.pill{font-size:12px;font-weight:600;border-radius:99px;padding:2px 10px;letter-spacing:0;
background:var(--faint);color:var(--soft);white-space:nowrap}
.pill.pass{background:var(--pass-bg);color:var(--pass)}
.pill.fail{background:var(--fail-bg);color:var(--fail)}
.levels{list-style:none;display:grid;grid-template-columns:repeat(4,1fr);gap:10px;margin:24px 0;
padding:0}
.levels li{border:1px solid var(--line);border-radius:10px;padding:10px 14px;display:flex;
flex-direction:column;gap:1px;min-width:0}
.levels li.pass{border-color:var(--pass)}.levels li.fail{border-color:var(--fail)}
.levels li.skip{border-style:dashed}
.levels b{font-weight:620}.levels a{color:inherit;text-decoration:none}
.levels a:hover{text-decoration:underline}
.levels span{font-size:13px;color:var(--soft)}
.levels .pass span{color:var(--pass)}.levels .fail span{color:var(--fail)}
dl{margin:0}dd{margin:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));
border:1px solid var(--line);border-radius:10px;overflow:hidden;
margin:0 0 22px}
.tiles>div{box-shadow:0 0 0 .5px var(--line);padding:12px 16px}
.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{font-size:21px;font-weight:620;letter-spacing:-.01em;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere;line-height:1.3}
.tiles small{display:block;font-size:12.5px;font-weight:400;color:var(--soft);letter-spacing:0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(400px,1fr));gap:0 32px}
.facts>div{display:grid;grid-template-columns:minmax(80px,180px) 1fr;gap:12px;padding:5px 0;
border-bottom:1px solid var(--faint);font-size:14px}
.facts dt{color:var(--soft);overflow-wrap:anywhere}.facts dd{overflow-wrap:anywhere}
.code,pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
font-size:.9em;overflow-wrap:anywhere}
.none{color:var(--soft)}.odd{color:var(--fail);font-weight:650}
.notes{margin:0;padding-left:20px}.notes li{margin-bottom:4px;overflow-wrap:anywhere}
.scroll{overflow:auto;max-height:48rem;border:1px solid var(--line);border-radius:10px;
margin:0 0 8px}
.scroll:focus-visible{outline:2px solid var(--accent);outline-offset:1px}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:13.5px;
font-variant-numeric:tabular-nums}
th,td{padding:7px 10px;text-align:left;vertical-align:top;border-bottom:1px solid var(--faint)}
tbody tr:last-child td{border-bottom:0}tbody tr:hover td{background-color:var(--faint)}
th{position:sticky;top:0;background:var(--card);border-bottom:1px solid var(--line);
font-weight:600;color:var(--soft);vertical-align:bottom;z-index:1}
th.n,td.n{text-align:right;white-space:nowrap}th.n{white-space:normal}
td .code{display:block;color:var(--soft);margin-top:2px;min-width:22ch}
.what{min-width:30ch;overflow-wrap:anywhere}
.group{display:flex;gap:10px;align-items:baseline;flex-wrap:wrap}
.verdict header+.facts,figure+.scroll,figure+.facts{margin-top:22px}
figure{margin:22px 0 0}figcaption{margin-bottom:8px}
figcaption b{font-weight:650;display:block}
figcaption span{color:var(--soft);font-size:13.5px}
.wide{overflow-x:auto}.wide svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
svg .title{font-size:12.5px}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.band{fill:var(--s0);opacity:.16}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.dot{stroke:var(--card);stroke-width:1}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}
.s5{--c:var(--s5)}
.line{stroke:var(--c)}.dot{fill:var(--c)}
.hollow{fill:var(--card);stroke:var(--c);stroke-width:1.8}
.off{fill:none;stroke:var(--fail);stroke-width:2.5}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 22px;margin:8px 0 0;padding:0;
font-size:13.5px;align-items:center}
.legend li{display:flex;gap:8px;align-items:center}
.legend svg{flex:none}
.heat rect{shape-rendering:crispEdges}.heat rect:hover{stroke:var(--ink);stroke-width:1}
.m{fill:url(#hatch)}.x{fill:url(#cross)}.z{fill:var(--zero)}
.ring,.halo{fill:none;stroke:var(--ink);stroke-width:1.8;pointer-events:none}
.halo{stroke:var(--card);stroke-width:5}
.hatch-bg{fill:var(--hatch-bg)}.hatch-line{stroke:var(--hatch);stroke-width:1.3}
.cross-bg{fill:#1769e0}.cross-line{stroke:#fff;stroke-width:1.3}
.defs{position:absolute;width:0;height:0}
.texts{display:grid;grid-template-columns:1fr 1fr;gap:14px}
.texts>div,.prompt{border:1px solid var(--line);border-radius:10px;overflow:hidden}
.texts h4,.prompt h4{margin:0;font-size:13px;color:var(--soft);padding:8px 14px;font-weight:600;
background:var(--faint)}
.prompt{margin-bottom:14px}
pre{margin:0;padding:12px 14px;white-space:pre-wrap;unicode-bidi:isolate;line-height:1.55}
mark{background:var(--mark);color:inherit;border-radius:3px}
footer{color:var(--soft);font-size:13px;padding-bottom:40px}
.sorter{all:unset;cursor:pointer}.sorter:focus-visible{outline:2px solid var(--accent)}
th[aria-sort=ascending] .sorter::after{content:" ↑"}
th[aria-sort=descending] .sorter::after{content:" ↓"}
.tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--card);font-size:12.5px;
padding:4px 9px;border-radius:6px;z-index:9;max-width:60ch;font-variant-numeric:tabular-nums}
@media screen and (max-width:760px){main,.top,footer{padding-left:12px;padding-right:12px}
section,.verdict{padding:20px 16px}.levels{grid-template-columns:1fr 1fr}
.texts,.facts{grid-template-columns:1fr}
h1{font-size:25px}.verdict header svg{width:46px;height:46px}
.top{flex-wrap:wrap}}
@media print{@page{margin:14mm}body{font-size:11px;background:none}
main,.top,footer{max-width:none;padding:0}
section,.verdict{border-radius:0;border-width:0 0 1px;padding:12px 0;margin:0}
.verdict{border-top-width:5px}.scroll{max-height:none;overflow:visible;border:0}
th{position:static}table{font-size:10px}th,td{padding:3px 6px}
thead{display:table-header-group;break-inside:avoid}
tr,figure,.tiles,.levels,.prompt{break-inside:avoid}h2,h3,.lead{break-after:avoid}
.facts{grid-template-columns:1fr 1fr}
.wide{overflow:visible}.wide svg{min-width:0!important}.tip{display:none}.what{min-width:0}
svg,.pill,mark,.tiles{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""

STYLE = (
    f"{_LIGHT}{_shades(0, 1)}\n@media screen and (prefers-color-scheme:dark){{{_DARK}"
    f"{_shades(0.9, 0)}}}\n{_RULES}"
)

# Sorting by a click on a column's head, and tooltips that come at once. Text only ever moves
# through textContent.
SCRIPT = """
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  };
  const missing = (row, column) =>
    row.cells[column].classList.contains("n") && row.cells[column].dataset.v === undefined;
  const sort = (head, column) => {
    const table = head.closest("table");
    const down = head.getAttribute("aria-sort") !== "descending" &&
      (head.classList.contains("n") || head.getAttribute("aria-sort") === "ascending");
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const gaps = missing(a, column) - missing(b, column);
      if (gaps) return gaps;
      const [u, v] = [value(a, column), value(b, column)];
      const order = typeof u === "number" && typeof v === "number"
        ? u - v : String(u).localeCompare(String(v), "en", {numeric: true});
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  };
  for (const head of document.querySelectorAll("table.sortable th")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sorter";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head, head.cellIndex));
    head.append(button);
  }
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  let held = null;
  const release = () => {
    if (held) held.owner.append(held.title);
    held = null;
    tip.hidden = true;
  };
  document.addEventListener("pointerover", (event) => {
    release();
    const owner = event.target;
    const title = owner instanceof SVGElement && owner.querySelector(":scope > title");
    if (!title) return;
    held = {owner, title};
    title.remove();
    tip.textContent = title.textContent;
    tip.hidden = false;
  });
  document.addEventListener("pointermove", (event) => {
    if (tip.hidden) return;
    const left = Math.min(event.clientX + 14, root.clientWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < root.clientHeight;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
  });
  document.documentElement.addEventListener("pointerleave", release);
})();
"""
