// The table of runs, where there are several: one is in focus, others are overlaid on its curves, one is compared with.
import { $, fill, make, say } from "./dom.js";
import { bytes, plain, whole } from "./format.js";

const KINDS = { training: "busy", starting: "busy", complete: "good", stopped: "warning", failed: "bad", silent: "warning" };
const HEAD = ["", "run", "status", "mode", "H", "codec", "workers", "step", "perplexity", "against", "sent", "against"];
const NUMBERS = 4; // columns from here on are numbers, to the right

let drawn = "";

// The first data-parallel run, or else the run in focus, unless one was chosen.
export function reference(runs, { against, focus }) {
  const named = (name) => runs.find((run) => run.run === name);
  return named(against) ?? runs.find((run) => run.about.mode === "data-parallel") ?? named(focus);
}

export function drawRuns(runs, view, colorOf, { focusOn, overlay, compareWith }) {
  const { focus, overlaid } = view;
  $("runs").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const now = JSON.stringify([runs, focus, overlaid, view.against]);
  if (now === drawn) return;
  drawn = now;
  const base = reference(runs, view);
  const rows = runs.map((run) => {
    const chosen = run.run === focus, shown = chosen || overlaid.includes(run.run), isBase = run === base;
    const box = make("input", { type: "checkbox", title: "overlay on the curves", "aria-label": `overlay ${run.run}`, checked: shown, disabled: chosen, onchange: (event) => overlay(run.run, event.target.checked) });
    const name = make("button", { type: "button", title: "show this run", "aria-current": chosen ? "true" : null, onclick: () => focusOn(run.run) }, run.run);
    const status = make("span", { class: "nowrap" }, make("span", { class: `dot ${KINDS[run.status] ?? ""}` }), ` ${run.status}`);
    const choose = make("input", { type: "radio", name: "against", title: "compare the others with this run", "aria-label": `compare with ${run.run}`, checked: isBase, onchange: () => compareWith(run.run) });
    const diloco = run.about.mode !== "data-parallel";
    const cells = [
      box, name, status, run.about.mode ?? "–", diloco ? whole(run.about["sync.num_inner_steps"]) : "–", diloco ? run.about["sync.codec"] ?? "–" : "–", whole(run.workers),
      run.steps && run.step !== run.steps && run.step !== null ? `${whole(run.step)} of ${whole(run.steps)}` : whole(run.step),
      plain(run.perplexity), make("span", { class: "nowrap" }, isBase ? "reference " : `${worse(run, base)} `, choose), bytes(run.bytes), isBase ? "" : fewer(run, base),
    ];
    const row = make("tr", { class: `run${chosen ? " chosen" : ""}`, "data-run": run.run }, ...cells.map((cell, index) => make("td", { class: index >= NUMBERS ? "number" : null }, cell)));
    if (shown) row.style.setProperty("--swatch", colorOf(run.run));
    return row;
  });
  say("runs-note", base ? `perplexity and bytes against ${base.run}` : "");
  const head = make("tr", {}, ...HEAD.map((text, index) => make("th", { class: index >= NUMBERS ? "number" : null }, text)));
  const table = $("runs-table"), focused = table.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  fill(table, make("thead", {}, head), make("tbody", {}, ...rows));
  if (focused) table.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

// How much larger the perplexity is, as `diloco compare` has it; other tokens make it another comparison.
function worse(run, base) {
  if (!Number.isFinite(run.loss) || !Number.isFinite(base?.loss) || run.loss === null || base.loss === null) return "–";
  const gap = 100 * Math.expm1(run.loss - base.loss);
  return `${gap > 0 ? "+" : gap < 0 ? "−" : ""}${plain(Math.abs(gap), 3)} %${run.tokens === base.tokens ? "" : ", other tokens"}`;
}

function fewer(run, base) {
  if (!run.bytes || !base?.bytes) return "–";
  const times = base.bytes / run.bytes;
  return times >= 1 ? `${plain(times, 3)}× less` : `${plain(1 / times, 3)}× more`;
}
