// The page: which runs are shown, when they are fetched again, and what is drawn of them.
import * as api from "./api.js";
import { AXES, PALETTE } from "./charts.js";
import { drawCurves } from "./curves.js";
import { $, fill, make, say } from "./dom.js";
import { drawMembers } from "./members.js";
import { drawAgreement, drawCommunication, drawConfig, drawFigures, drawNotes, drawSamples, drawStatus } from "./panels.js";
import { drawRuns } from "./runs.js";
import { Scrubber } from "./scrubber.js";
import { describe, drawFailures, drawWaterfall } from "./waterfall.js";

const ROUNDS = 8, LEAST_PAUSE = 1000;
const view = {
  runs: [], focus: null, overlaid: [], axis: "step", smoothing: 0.6, log: false, each: true,
  state: null, series: new Map(), rounds: null, config: null, before: null,
};
const scrubber = new Scrubber(() => refresh());
let unfollow = null, running = false, again = false, timer = null, lastFetch = 0;

async function start() {
  chooseAxis();
  listen();
  try {
    const { runs, root } = await api.runs();
    view.runs = runs;
    document.title = `${root} · diloco`;
    const asked = new URLSearchParams(location.hash.slice(1)).get("run");
    focusOn(runs.some((run) => run.run === asked) ? asked : runs[0]?.run);
  } catch (error) { complain(error); }
  setInterval(async () => { try { view.runs = (await api.runs()).runs; showRuns(); } catch { /* the stream says so */ } }, 15000);
}

function focusOn(name) {
  if (!name) { complain(new Error("there is no run here yet")); return; }
  view.focus = name;
  view.overlaid = view.overlaid.filter((one) => one !== name);
  view.before = view.config = null;
  if (view.runs.length > 1) history.replaceState(null, "", `#${new URLSearchParams({ run: name })}`);
  say("title", name);
  $("title").title = name;
  scrubber.until = null;
  fill($("json"), "JSON: ", make("a", { href: "/api/runs" }, "runs"), ...api.addresses(name).map(([what, path]) => make("a", { href: path }, what)));
  showRuns();
  followAll();
  refresh();
}

const showRuns = () => drawRuns(view.runs, view, colorOf, focusOn, overlay);
const shownNames = () => [view.focus, ...view.overlaid];
const colorOf = (name) => PALETTE[shownNames().indexOf(name) % PALETTE.length];

function overlay(name, wanted) {
  view.overlaid = wanted ? [...view.overlaid, name] : view.overlaid.filter((one) => one !== name);
  showRuns();
  followAll();
  refresh();
}

function followAll() {
  unfollow?.();
  unfollow = api.follow(shownNames(), () => { if (scrubber.until === null) soon(); else refreshRange(); },
    (connected) => { say("connection", connected ? "" : "the server does not answer; trying again"); });
}

// At most one fetch a second, and none while the page is hidden.
function soon() {
  if (timer || document.hidden) return;
  timer = setTimeout(() => { timer = null; refresh(); }, Math.max(0, LEAST_PAUSE - (Date.now() - lastFetch)));
}

async function refreshRange() {
  const state = await api.state(view.focus, null).catch(() => null);
  if (state) scrubber.range(state.first_time, state.last_time);
}

async function refresh() {
  if (running) { again = true; return; }
  running = true;
  do {
    again = false;
    lastFetch = Date.now();
    const until = scrubber.until, focus = view.focus, points = Math.min(1200, Math.max(300, $("loss").clientWidth));
    try {
      const [state, rounds, config, ...series] = await Promise.all([
        api.state(focus, until), api.rounds(focus, until, view.before, ROUNDS), view.config ?? api.config(focus),
        ...shownNames().map((name) => api.series(name, name === focus ? until : null, points)),
      ]);
      if (focus !== view.focus) continue;
      Object.assign(view, { state, rounds, config: state.step ? config : null });
      view.series = new Map(series.map((one) => [one.run, one]));
      drawAll(config);
    } catch (error) { complain(error); }
  } while (again);
  running = false;
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
}

function drawAll(config) {
  const { state } = view;
  scrubber.range(state.first_time, state.last_time);
  drawStatus(state, scrubber.until !== null);
  drawFigures(state);
  drawAllCurves();
  drawRounds();
  drawMembers(state);
  drawCommunication(state);
  drawAgreement(state);
  drawNotes(state);
  drawSamples(state);
  if (config) drawConfig(config);
}

function drawAllCurves() {
  const shown = shownNames().filter((name) => view.series.has(name)).map((name) => ({ name, series: view.series.get(name), color: colorOf(name) }));
  drawCurves(shown, view);
}

function drawRounds() {
  const { rounds, all } = view.rounds, { state } = view;
  drawWaterfall($("waterfall"), rounds, warmStart());
  drawFailures(state.rounds, state.first_time ?? 0);
  const usual = state.rounds.straggler;
  say("rounds-note", [describe(rounds), usual ? `worker ${usual.worker} was the last in ${usual.rounds} of the last ${usual.of} rounds` : ""].filter(Boolean).join(" · "));
  say("rounds-range", rounds.length ? `${rounds[0].sequence}–${rounds.at(-1).sequence}` : "");
  $("rounds-earlier").disabled = all <= rounds.length;
  $("rounds-later").disabled = view.before === null;
}

// The steps before the first round; 0 once they are over.
function warmStart() {
  const steps = view.config?.options["sync.warm_start"] ?? 0;
  return view.state.step < steps ? steps : 0;
}

function turnRounds(direction) {
  const { rounds } = view.rounds ?? { rounds: [] };
  if (!rounds.length || $(direction < 0 ? "rounds-earlier" : "rounds-later").disabled) return;
  const newest = rounds.at(-1).sequence + ROUNDS + 1;
  view.before = direction < 0 ? rounds[0].sequence : newest > (view.state.rounds.last?.sequence ?? 0) ? null : newest;
  refresh();
}

function chooseAxis(name = view.axis) {
  view.axis = name;
  fill($("axis"), ...Object.keys(AXES).map((key) => make("button", { type: "button", role: "radio", "aria-checked": String(key === name), onclick: () => chooseAxis(key) }, { step: "steps", seconds: "time" }[key] ?? key)));
  if (view.state) drawAllCurves();
}

function listen() {
  $("smoothing").addEventListener("input", (event) => { view.smoothing = Number(event.target.value); showSmoothing(); drawAllCurves(); });
  $("log").addEventListener("change", (event) => { view.log = event.target.checked; drawAllCurves(); });
  $("each").addEventListener("change", (event) => { view.each = event.target.checked; drawAllCurves(); });
  $("config-filter").addEventListener("input", () => view.config && drawConfig(view.config));
  $("members-filter").addEventListener("input", () => view.state && drawMembers(view.state));
  $("rounds-earlier").addEventListener("click", () => turnRounds(-1));
  $("rounds-later").addEventListener("click", () => turnRounds(1));
  $("theme-button").addEventListener("click", () => window.switchTheme());
  $("keys-button").addEventListener("click", () => $("keys").showModal());
  addEventListener("themechange", () => view.state && drawAllCurves());
  addEventListener("resize", () => view.rounds && drawWaterfall($("waterfall"), view.rounds.rounds, warmStart()));
  document.addEventListener("visibilitychange", () => !document.hidden && scrubber.until === null && soon());
  document.addEventListener("keydown", pressed);
  showSmoothing();
}

const showSmoothing = () => say("smoothing-value", view.smoothing.toFixed(2));

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input[type=search], dialog[open]")) return;
  const actions = {
    1: () => chooseAxis("step"), 2: () => chooseAxis("tokens"), 3: () => chooseAxis("bytes"), 4: () => chooseAxis("seconds"),
    l: () => scrubber.live(), "[": () => scrubber.move(-0.01), "]": () => scrubber.move(0.01), ",": () => turnRounds(-1), ".": () => turnRounds(1),
    t: () => window.switchTheme(), "?": () => $("keys").showModal(),
  };
  if (!event.target.closest("button, a")) actions[" "] = () => scrubber.toggle();
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
}

function complain(error) {
  $("problems").hidden = false;
  fill($("problems"), make("p", {}, String(error.message ?? error)));
}

start();
