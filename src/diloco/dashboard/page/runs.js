// The list of runs, where there are several: one is in focus, others are overlaid on its curves.
import { $, fill, make } from "./dom.js";
import { plain, whole } from "./format.js";

const KINDS = { training: "busy", starting: "busy", complete: "good", stopped: "warning", failed: "bad", silent: "warning" };

export function drawRuns(runs, { focus, overlaid }, colorOf, focusOn, overlay) {
  const target = $("runs");
  target.hidden = runs.length < 2;
  if (target.hidden) return;
  const rows = runs.map((run) => {
    const chosen = run.run === focus, shown = chosen || overlaid.includes(run.run);
    const box = make("input", { type: "checkbox", title: "overlay on the curves", "aria-label": `overlay ${run.run}`, checked: shown, disabled: chosen, onchange: (event) => overlay(run.run, event.target.checked) });
    const row = make("div", { class: `run${chosen ? " chosen" : ""}` }, box,
      make("button", { type: "button", title: run.run, "aria-current": chosen ? "true" : null, onclick: () => focusOn(run.run) }, run.run),
      make("span", { class: `dot ${KINDS[run.status] ?? ""}`, title: run.status }),
      make("span", { class: "about" }, about(run)));
    if (shown) row.style.setProperty("--swatch", colorOf(run.run));
    return row;
  });
  fill(target, make("h2", {}, "Runs"), ...rows);
}

function about(run) {
  const perplexity = run.perplexity ? `perplexity ${plain(run.perplexity, 3)}` : run.status;
  return [run.about["model.name"], run.workers ? `${run.workers} w` : null, run.step ? `step ${whole(run.step)}` : null, perplexity].filter(Boolean).join(" · ");
}
