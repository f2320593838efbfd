// The table of runs, where there are several: one is in focus, others are overlaid on its curves, one is compared with.
import { $, fill, make, say } from "./dom.js";
import { bytes, missing, plain, whole } from "./format.js";

const DOTS = { training: "busy", starting: "busy", complete: "good", stopped: "warning", failed: "bad", silent: "warning" };
const HEAD = ["", "run", "status", "mode", "H", "codec", "workers", "step", "perplexity", "against", "sent", "against", ""];
const FIRST_NUMBER = 4; // the columns from here on are numbers, to the right

let drawn = "";

// The run that others are compared with: the chosen one, or else the first data-parallel one, or else that in focus.
export function reference(runs, { against, focus }) {
  const named = (name) => runs.find((run) => run.run === name);
  return named(against) ?? runs.find((run) => run.about.mode === "data-parallel") ?? named(focus);
}

export function drawRuns(runs, view, colorOf, actions) {
  $("runs").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const content = JSON.stringify([runs, view.focus, view.overlaid, view.against]);
  if (content === drawn) return;
  drawn = content;
  const base = reference(runs, view);
  say("runs-note", base ? `perplexity and bytes against ${base.run}` : "");
  const cellClass = (index) => (index >= FIRST_NUMBER ? "number" : null);
  const head = make("tr", {}, ...HEAD.map((text, index) => make("th", { class: cellClass(index) }, text)));
  const rows = runs.map((run) => {
    const inFocus = run.run === view.focus;
    const cells = cellsOf(run, base, view, actions).map((cell, index) => make("td", { class: cellClass(index) }, cell));
    const row = make("tr", { class: `run${inFocus ? " chosen" : ""}`, "data-run": run.run }, ...cells);
    if (inFocus || view.overlaid.includes(run.run)) row.style.setProperty("--swatch", colorOf(run.run));
    return row;
  });
  const table = $("runs-table");
  const focusedLabel = table.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  fill(table, make("thead", {}, head), make("tbody", {}, ...rows));
  if (focusedLabel) table.querySelector(`[aria-label="${CSS.escape(focusedLabel)}"]`)?.focus({ preventScroll: true });
}

function cellsOf(run, base, { focus, overlaid }, { focusOn, overlay, compareWith }) {
  const inFocus = run.run === focus;
  const isBase = run === base;
  const isDiloco = run.about.mode !== "data-parallel";
  const unfinished = run.steps && run.step !== run.steps && run.step !== null;
  const overlayBox = make("input", {
    type: "checkbox", title: "overlay on the curves", "aria-label": `overlay ${run.run}`,
    checked: inFocus || overlaid.includes(run.run), disabled: inFocus,
    onchange: (event) => overlay(run.run, event.target.checked),
  });
  const name = make("button", {
    type: "button", title: "show this run", "aria-current": inFocus ? "true" : null, onclick: () => focusOn(run.run),
  }, run.run);
  const compare = make("input", {
    type: "radio", name: "against", title: "compare the others with this run", "aria-label": `compare with ${run.run}`,
    checked: isBase, onchange: () => compareWith(run.run),
  });
  return [
    overlayBox,
    name,
    make("span", { class: "nowrap" }, make("span", { class: `dot ${DOTS[run.status] ?? ""}` }), ` ${run.status}`),
    run.about.mode ?? missing,
    isDiloco ? whole(run.about["sync.num_inner_steps"]) : missing,
    isDiloco ? run.about["sync.codec"] ?? missing : missing,
    whole(run.workers),
    unfinished ? `${whole(run.step)} of ${whole(run.steps)}` : whole(run.step),
    plain(run.perplexity),
    make("span", { class: "nowrap" }, isBase ? "reference " : `${perplexityGap(run, base)} `, compare),
    bytes(run.bytes),
    isBase ? "" : bytesRatio(run, base),
    isBase || run.tokens === base?.tokens ? "" : make("span", { class: "nowrap" }, "other tokens"),
  ];
}

// How much larger the perplexity is, as `diloco compare` has it.
function perplexityGap(run, base) {
  if (!Number.isFinite(run.loss) || !Number.isFinite(base?.loss)) return missing;
  const percent = 100 * Math.expm1(run.loss - base.loss);
  const sign = percent > 0 ? "+" : percent < 0 ? "−" : "";
  return `${sign}${plain(Math.abs(percent), 3)} %`;
}

// How many times as many bytes a worker sent; a run that has averaged nothing is not compared.
function bytesRatio(run, base) {
  if (!run.bytes || !base?.bytes || !run.rounds || !base.rounds) return missing;
  const times = base.bytes / run.bytes;
  return times >= 1 ? `${plain(times, 3)}× less` : `${plain(1 / times, 3)}× more`;
}
