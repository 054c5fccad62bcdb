"""The page's style sheet: one column, light and dark, from 360 pixels on."""

STYLE = """
:root{--ink:#1c2430;--soft:#566373;--rule:#dfe4ea;--paper:#fff;--card:#f4f6f9;--calm:#f2b48a;--line:#14304f;
--hand:#1f7a5c;--plain:#b3261e;--still:#6b7685;--good:#1f6b4f;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e7ebf0;--soft:#a3b0bf;--rule:#2c3642;--paper:#12171d;--card:#1a2129;
--calm:#8a5226;--line:#d5e4f7;--hand:#5fc29c;--plain:#f0857d;--still:#8e9bab;--good:#6cc7a2;--bad:#f0857d}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:940px;padding:32px 16px 64px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:28px;line-height:1.2;margin:0 0 8px}h2{font-size:20px;margin:44px 0 4px}
h3{font-size:16px;margin:28px 0 2px}p{margin:6px 0;max-width:75ch}.lead,caption,footer,.key{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:10px;margin:20px 0}
.card{background:var(--card);border-radius:10px;padding:12px 14px}.card b{display:block;font-size:22px;line-height:1.3}
.card span{color:var(--soft);font-size:14px}.good{color:var(--good)}.bad{color:var(--bad)}
svg{width:100%;height:auto;margin:10px 0}svg.wide{display:block}svg.narrow{display:none}
@media(max-width:640px){svg.wide{display:none}svg.narrow{display:block}}
svg text{fill:var(--ink);font-size:13px}svg .tick,svg .note{fill:var(--soft);font-size:12px}svg .strong{font-weight:650}
.grid{stroke:var(--rule)}.base{stroke:var(--ink)}.mark{stroke:var(--soft);stroke-dasharray:4 4}
.calm,.disturbed,.way{fill:none;stroke-linejoin:round}
.calm{stroke:var(--calm);stroke-width:6}.disturbed{stroke:var(--line);stroke-width:1.3}
.way{stroke-width:2}.still{stroke:var(--still);stroke-dasharray:2 4}.surefoot{stroke:var(--line);stroke-width:2.6}
.hand_written{stroke:var(--hand);stroke-dasharray:9 4}
.torch_save_on_sigterm{stroke:var(--plain);stroke-dasharray:9 3 2 3}
.stall{fill:var(--line);fill-opacity:.5}
.key{display:flex;flex-wrap:wrap;gap:2px 20px;font-size:14px;margin:6px 0}
.key svg{display:inline-block;width:34px;height:10px;margin:0 7px 0 0;vertical-align:0}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px;margin:10px 0}
caption{text-align:left;font-size:14px;padding-bottom:4px}
th,td{padding:6px 8px;text-align:right;border-bottom:1px solid var(--rule);vertical-align:top}
thead th{color:var(--soft);font-weight:500;vertical-align:bottom}
th:first-child,td.words,th.words{text-align:left}tbody th{font-weight:600}
th small{display:block;color:var(--soft);font-weight:400;font-size:13px}
@media(max-width:640px){body{padding:24px 12px 48px}table{font-size:13px}th,td{padding:6px 3px}
th:first-child{padding-left:0}th:last-child,td:last-child{padding-right:0}}
td.none{color:var(--soft)}ol,ul{padding-left:22px}li{margin:4px 0}pre{white-space:pre-wrap;font-size:13px}
code{overflow-wrap:anywhere}footer{margin-top:44px;font-size:14px}
"""
