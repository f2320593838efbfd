// The page: which runs are shown, when they are fetched again, and what is drawn of them.
import * as api from "./api.js";
import { AXES, colours } from "./charts.js";
import { drawCurves, smoothingOf } from "./curves.js";
import { $, fill, make, say } from "./dom.js";
import { drawMembers } from "./members.js";
import {
  drawAgreement, drawCommunication, drawConfig, drawFigures, drawHealth, drawNotes, drawSamples, drawStatus,
} from "./panels.js";
import { drawRuns } from "./runs.js";
import { Scrubber } from "./scrubber.js";
import { describe, drawFailures, drawWaterfall } from "./waterfall.js";

const ROUNDS_SHOWN = 8;
const LEAST_PAUSE = 1000;
const LIST_PAUSE = 5000;
const AXIS_BUTTONS = { step: "steps", tokens: "tokens", bytes: "bytes", seconds: "time" };

const view = {
  // What the reader has chosen.
  focus: null,
  overlaid: [],
  against: null,
  axis: "step",
  smoothing: null,
  log: false,
  each: true,
  before: null, // the waterfall shows rounds before this one; null: the latest
  // What the server has sent.
  connected: true,
  runs: [],
  state: null,
  series: new Map(),
  rounds: null,
  config: null,
};
const scrubber = new Scrubber(() => refresh());
let unfollow = null;
let refreshing = false;
let refreshAgain = false;
let timer = null;
let lastFetch = 0;

const isReplay = () => scrubber.until !== null;
const shownNames = () => [view.focus, ...view.overlaid];
const colorOf = (name) => view.colorOf(name, shownNames());

async function start() {
  readAddress();
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
  } catch (error) {
    complain(error);
  }
  setInterval(refreshRuns, LIST_PAUSE);
  setInterval(showHealth, LEAST_PAUSE); // the age of the last event grows
}

// What is shown is in the address: a link to it shows the same.
function readAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  const axis = address.get("axis");
  const smoothing = Number(address.get("smoothing") ?? NaN);
  view.focus = address.get("run");
  view.overlaid = address.getAll("over");
  view.against = address.get("against");
  view.axis = axis in AXES ? axis : "step";
  view.smoothing = Number.isFinite(smoothing) ? Math.min(0.98, Math.max(0, smoothing)) : null;
  view.log = address.get("log") === "1";
  view.each = address.get("each") !== "0";
  $("log").checked = view.log;
  $("each").checked = view.each;
}

function writeAddress() {
  const address = new URLSearchParams();
  if (view.runs.length > 1) address.append("run", view.focus);
  for (const name of view.overlaid) address.append("over", name);
  if (view.against) address.append("against", view.against);
  if (view.axis !== "step") address.append("axis", view.axis);
  if (view.smoothing !== null) address.append("smoothing", String(view.smoothing));
  if (view.log) address.append("log", "1");
  if (!view.each) address.append("each", "0");
  const hash = String(address);
  if (hash === location.hash.slice(1)) return;
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

// Which runs are shown

function focusOn(name) {
  if (!name) {
    complain(new Error("there is no run here yet"));
    return;
  }
  view.focus = name;
  view.overlaid = view.overlaid.filter((other) => other !== name);
  view.before = null;
  view.config = null;
  say("title", name);
  $("title").title = name;
  scrubber.until = null;
  const links = api.addresses(name).map(([what, path]) => make("a", { href: path }, what));
  fill($("json"), "JSON: ", make("a", { href: "/api/runs" }, "runs"), ...links);
  showRuns();
  followShown();
  refresh();
}

function overlay(name, wanted) {
  view.overlaid = wanted ? [...view.overlaid, name] : view.overlaid.filter((other) => other !== name);
  showRuns();
  followShown();
  refresh();
}

function compareWith(name) {
  view.against = name;
  showRuns();
}

function showRuns() {
  writeAddress();
  drawRuns(view.runs, view, colorOf, { focusOn, overlay, compareWith });
}

async function refreshRuns() {
  try {
    view.runs = (await api.runs()).runs;
    showRuns();
  } catch { /* the stream says so */ }
}

// When they are fetched

function followShown() {
  unfollow?.();
  const onChange = () => {
    if (isReplay()) refreshRange();
    else refreshSoon();
  };
  const onConnection = (connected) => {
    view.connected = connected;
    showHealth();
  };
  unfollow = api.follow(shownNames(), onChange, onConnection);
}

// At most one fetch a second, and none while the page is hidden.
function refreshSoon() {
  if (timer || document.hidden) return;
  const pause = Math.max(0, LEAST_PAUSE - (Date.now() - lastFetch));
  timer = setTimeout(() => {
    timer = null;
    refresh();
  }, pause);
}

async function refreshRange() {
  const state = await api.state(view.focus, null).catch(() => null);
  if (state) scrubber.range(state);
}

async function refresh() {
  if (refreshing) {
    refreshAgain = true;
    return;
  }
  refreshing = true;
  do {
    refreshAgain = false;
    lastFetch = Date.now();
    try {
      await fetchAndDraw();
    } catch (error) {
      complain(error);
    }
  } while (refreshAgain);
  refreshing = false;
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
}

async function fetchAndDraw() {
  const { focus } = view;
  const { until } = scrubber;
  const points = Math.min(1200, Math.max(300, $("loss").clientWidth));
  const [state, rounds, config, ...series] = await Promise.all([
    api.state(focus, until),
    api.rounds(focus, until, view.before, ROUNDS_SHOWN),
    view.config ?? api.config(focus),
    ...shownNames().map((name) => api.series(name, name === focus ? until : null, points)),
  ]);
  if (focus !== view.focus) return; // another run was chosen meanwhile, and asked for a fetch of its own
  view.state = state;
  view.rounds = rounds;
  view.config = state.step ? config : null; // until training has begun the options may change
  view.fetched = Date.now();
  view.series = new Map(series.map((curves) => [curves.run, curves]));
  drawAll(config);
}

// What is drawn of them

function drawAll(config) {
  const { state } = view;
  scrubber.range(state);
  drawStatus(state, isReplay());
  showHealth();
  drawFigures(state);
  drawAllCurves();
  drawRounds();
  drawMembers(state);
  drawCommunication(state);
  drawAgreement(state);
  drawNotes(state);
  drawSamples(state);
  if (config) drawConfig(config);
  if (!isReplay() && !state.summary) updateRow(state);
}

function showHealth() {
  if (view.state) drawHealth(view.state, view, isReplay());
}

// The row of the run in focus says what the figures say, which are fetched more often than the table.
function updateRow(state) {
  const row = view.runs.find((run) => run.run === view.focus);
  if (!row) return;
  row.status = state.status;
  row.step = state.step;
  row.loss = state.validation?.loss;
  row.perplexity = state.validation?.perplexity;
  row.bytes = state.communication.bytes_sent_per_worker;
  row.tokens = state.run_tokens ?? state.tokens;
  showRuns();
}

function drawAllCurves() {
  const names = shownNames().filter((name) => view.series.has(name));
  const shown = names.map((name) => ({ name, series: view.series.get(name), color: colorOf(name) }));
  drawCurves(shown, view);
  const weight = smoothingOf(shown, view.smoothing);
  $("smoothing").value = String(weight);
  say("smoothing-value", weight ? weight.toFixed(2) : "none");
  writeAddress();
}

function drawRounds() {
  const { state } = view;
  const { rounds, all } = view.rounds;
  const { straggler } = state.rounds;
  showWaterfall();
  drawFailures(state.rounds, state);
  const usuallyLast = straggler
    ? `worker ${straggler.worker} was the last in ${straggler.rounds} of the last ${straggler.of} rounds` : "";
  say("rounds-note", [describe(rounds), usuallyLast].filter(Boolean).join(" · "));
  say("rounds-range", rounds.length ? `${rounds[0].sequence}–${rounds.at(-1).sequence}` : "");
  $("rounds-earlier").disabled = all <= rounds.length;
  $("rounds-later").disabled = view.before === null;
}

function showWaterfall() {
  if (view.rounds) drawWaterfall($("waterfall"), view.rounds.rounds, view.state, warmStart());
}

// The steps before the first round; 0 once they are over.
function warmStart() {
  const steps = view.config?.options["sync.warm_start"] ?? 0;
  return view.state.step < steps ? steps : 0;
}

function turnRounds(direction) {
  const rounds = view.rounds?.rounds ?? [];
  if (!rounds.length || $(direction < 0 ? "rounds-earlier" : "rounds-later").disabled) return;
  if (direction < 0) {
    view.before = rounds[0].sequence;
  } else {
    const before = rounds.at(-1).sequence + ROUNDS_SHOWN + 1;
    view.before = before > (view.state.rounds.last?.sequence ?? 0) ? null : before;
  }
  refresh();
}

function chooseAxis(name = view.axis) {
  view.axis = name;
  const buttons = Object.entries(AXIS_BUTTONS).map(([key, text]) => make("button", {
    type: "button", role: "radio", "aria-checked": String(key === name), onclick: () => chooseAxis(key),
  }, text));
  fill($("axis"), ...buttons);
  if (view.state) drawAllCurves();
}

// What the reader does

function listen() {
  const redrawCurves = () => view.state && drawAllCurves();
  $("smoothing").addEventListener("input", (event) => {
    view.smoothing = Number(event.target.value);
    drawAllCurves();
  });
  for (const option of ["log", "each"]) {
    $(option).addEventListener("change", (event) => {
      view[option] = event.target.checked;
      drawAllCurves();
    });
  }
  $("statistic").addEventListener("change", () => drawAllCurves());
  $("config-filter").addEventListener("input", () => view.config && drawConfig(view.config));
  $("members-filter").addEventListener("input", () => view.state && drawMembers(view.state));
  $("rounds-earlier").addEventListener("click", () => turnRounds(-1));
  $("rounds-later").addEventListener("click", () => turnRounds(1));
  $("theme-button").addEventListener("click", () => window.switchTheme());
  $("keys-button").addEventListener("click", () => $("keys").showModal());
  addEventListener("themechange", redrawCurves);
  addEventListener("resize", showWaterfall);
  addEventListener("hashchange", () => {
    readAddress();
    chooseAxis();
    focusOn(view.runs.some((run) => run.run === view.focus) ? view.focus : view.runs[0]?.run);
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !isReplay()) refreshSoon();
  });
  document.addEventListener("keydown", onKey);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input[type=search], dialog[open]")) return;
  const actions = {
    1: () => chooseAxis("step"),
    2: () => chooseAxis("tokens"),
    3: () => chooseAxis("bytes"),
    4: () => chooseAxis("seconds"),
    l: () => scrubber.live(),
    "[": () => scrubber.move(-0.01),
    "]": () => scrubber.move(0.01),
    ",": () => turnRounds(-1),
    ".": () => turnRounds(1),
    t: () => window.switchTheme(),
    "?": () => $("keys").showModal(),
  };
  if (!event.target.closest("button, a")) actions[" "] = () => scrubber.toggle();
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function complain(error) {
  $("problems").hidden = false;
  fill($("problems"), make("p", {}, String(error.message ?? error)));
}

start();
