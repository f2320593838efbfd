// The page: which runs are shown, when they are fetched again, and what is drawn of them.
import * as api from "./api.js";
import { AXES, colours } from "./charts.js";
import { drawCurves, smoothingOf } from "./curves.js";
import { $, fill, make, say } from "./dom.js";
import { drawMembers } from "./members.js";
import { drawAgreement, drawCommunication, drawConfig, drawFigures, drawHealth, drawNotes, drawSamples, drawStatus } from "./panels.js";
import { drawRuns } from "./runs.js";
import { Scrubber } from "./scrubber.js";
import { describe, drawFailures, drawWaterfall } from "./waterfall.js";

const ROUNDS = 8, LEAST_PAUSE = 1000, LIST_PAUSE = 5000;
const view = {
  runs: [], focus: null, overlaid: [], against: null, axis: "step", smoothing: null, log: false, each: true, connected: true,
  state: null, series: new Map(), rounds: null, config: null, before: null,
};
const scrubber = new Scrubber(() => refresh());
let unfollow = null, running = false, again = false, timer = null, lastFetch = 0;

async function start() {
  fromAddress();
  chooseAxis();
  listen();
  try {
    const { runs, root } = await api.runs();
    view.runs = runs;
    view.colorOf = colours(root);
    document.title = `${root} · diloco`;
    const names = new Set(runs.map((run) => run.run));
    view.overlaid = view.overlaid.filter((name) => names.has(name));
    focusOn(names.has(view.focus) ? view.focus : runs[0]?.run);
  } catch (error) { complain(error); }
  setInterval(async () => { try { view.runs = (await api.runs()).runs; showRuns(); } catch { /* the stream says so */ } }, LIST_PAUSE);
  setInterval(() => view.state && drawHealth(view.state, view, scrubber.until !== null), LEAST_PAUSE);
}

// What is shown is in the address: a link to it shows the same.
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), smoothing = given.get("smoothing");
  Object.assign(view, {
    focus: given.get("run"), overlaid: given.getAll("over"), against: given.get("against"), axis: given.get("axis") in AXES ? given.get("axis") : "step",
    smoothing: smoothing === null || !Number.isFinite(Number(smoothing)) ? null : Math.min(0.98, Math.max(0, Number(smoothing))),
    log: given.get("log") === "1", each: given.get("each") !== "0",
  });
  $("log").checked = view.log;
  $("each").checked = view.each;
}

function toAddress() {
  const values = [
    view.runs.length > 1 ? ["run", view.focus] : null, ...view.overlaid.map((name) => ["over", name]), view.against ? ["against", view.against] : null,
    view.axis === "step" ? null : ["axis", view.axis], view.smoothing === null ? null : ["smoothing", String(view.smoothing)], view.log ? ["log", "1"] : null, view.each ? null : ["each", "0"],
  ].filter(Boolean);
  const address = String(new URLSearchParams(values));
  if (address !== location.hash.slice(1)) history.replaceState(null, "", address ? `#${address}` : location.pathname + location.search);
}

function focusOn(name) {
  if (!name) { complain(new Error("there is no run here yet")); return; }
  view.focus = name;
  view.overlaid = view.overlaid.filter((one) => one !== name);
  view.before = view.config = null;
  say("title", name);
  $("title").title = name;
  scrubber.until = null;
  fill($("json"), "JSON: ", make("a", { href: "/api/runs" }, "runs"), ...api.addresses(name).map(([what, path]) => make("a", { href: path }, what)));
  showRuns();
  followAll();
  refresh();
}

const compareWith = (name) => { view.against = name; showRuns(); };
const showRuns = () => { toAddress(); drawRuns(view.runs, view, colorOf, { focusOn, overlay, compareWith }); };
const shownNames = () => [view.focus, ...view.overlaid];
const colorOf = (name) => view.colorOf(name, shownNames());

function overlay(name, wanted) {
  view.overlaid = wanted ? [...view.overlaid, name] : view.overlaid.filter((one) => one !== name);
  showRuns();
  followAll();
  refresh();
}

function followAll() {
  unfollow?.();
  unfollow = api.follow(shownNames(), () => { if (scrubber.until === null) soon(); else refreshRange(); },
    (connected) => { view.connected = connected; if (view.state) drawHealth(view.state, view, scrubber.until !== null); });
}

// At most one fetch a second, and none while the page is hidden.
function soon() {
  if (timer || document.hidden) return;
  timer = setTimeout(() => { timer = null; refresh(); }, Math.max(0, LEAST_PAUSE - (Date.now() - lastFetch)));
}

async function refreshRange() {
  const state = await api.state(view.focus, null).catch(() => null);
  if (state) scrubber.range(state);
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
      Object.assign(view, { state, rounds, config: state.step ? config : null, fetched: Date.now() });
      view.series = new Map(series.map((one) => [one.run, one]));
      drawAll(config);
    } catch (error) { complain(error); }
  } while (again);
  running = false;
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
}

function drawAll(config) {
  const { state } = view;
  scrubber.range(state);
  drawStatus(state, scrubber.until !== null);
  drawHealth(state, view, scrubber.until !== null);
  drawFigures(state);
  drawAllCurves();
  drawRounds();
  drawMembers(state);
  drawCommunication(state);
  drawAgreement(state);
  drawNotes(state);
  drawSamples(state);
  if (config) drawConfig(config);
  if (scrubber.until === null && !state.summary) alignRow(state);
}

// The row of the run in focus says what the figures say, which are fetched more often than the table.
function alignRow(state) {
  const row = view.runs.find((run) => run.run === view.focus), { validation, communication } = state;
  if (!row) return;
  Object.assign(row, { status: state.status, step: state.step, loss: validation?.loss, perplexity: validation?.perplexity, bytes: communication.bytes_sent_per_worker, tokens: state.tokens });
  showRuns();
}

function drawAllCurves() {
  const shown = shownNames().filter((name) => view.series.has(name)).map((name) => ({ name, series: view.series.get(name), color: colorOf(name) }));
  drawCurves(shown, view);
  const weight = smoothingOf(shown, view.smoothing);
  $("smoothing").value = String(weight);
  say("smoothing-value", weight ? weight.toFixed(2) : "none");
  toAddress();
}

function drawRounds() {
  const { rounds, all } = view.rounds, { state } = view;
  drawWaterfall($("waterfall"), rounds, state, warmStart());
  drawFailures(state.rounds, state);
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
  $("smoothing").addEventListener("input", (event) => { view.smoothing = Number(event.target.value); drawAllCurves(); });
  $("log").addEventListener("change", (event) => { view.log = event.target.checked; drawAllCurves(); });
  $("each").addEventListener("change", (event) => { view.each = event.target.checked; drawAllCurves(); });
  $("statistic").addEventListener("change", () => drawAllCurves());
  $("config-filter").addEventListener("input", () => view.config && drawConfig(view.config));
  $("members-filter").addEventListener("input", () => view.state && drawMembers(view.state));
  $("rounds-earlier").addEventListener("click", () => turnRounds(-1));
  $("rounds-later").addEventListener("click", () => turnRounds(1));
  $("theme-button").addEventListener("click", () => window.switchTheme());
  $("keys-button").addEventListener("click", () => $("keys").showModal());
  addEventListener("themechange", () => view.state && drawAllCurves());
  addEventListener("resize", () => view.rounds && drawWaterfall($("waterfall"), view.rounds.rounds, view.state, warmStart()));
  document.addEventListener("visibilitychange", () => !document.hidden && scrubber.until === null && soon());
  document.addEventListener("keydown", pressed);
  addEventListener("hashchange", () => { fromAddress(); chooseAxis(); focusOn(view.runs.some((run) => run.run === view.focus) ? view.focus : view.runs[0]?.run); });
}

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
