// Which curves each panel shows.
import { AXES, band, line, PALETTE, show, smoothed } from "./charts.js";
import { $, colour, fill, make } from "./dom.js";

// `shown`: [{ name, series, color }], the first is the run in focus.
const FAR_APART = 8, FEW_POINTS = 300, SMOOTHING = 0.6;
const ofWorker = (worker) => PALETTE[(Number(worker) + 1) % PALETTE.length];

export function drawCurves(shown, options) {
  if (!shown.length) return;
  const { series } = shown[0];
  drawLoss(shown, options);
  drawRates(shown, options);
  drawRounds(series, options);
  drawStatistic(series, options);
}

// As asked for; else none where the points are few, since a smoothed curve is late and may lie on the wrong side.
export function smoothingOf(shown, asked) {
  if (asked !== null) return asked;
  return Math.max(0, ...shown.map(({ series }) => series.loss.step.length)) < FEW_POINTS ? 0 : SMOOTHING;
}

// Runs that sent far more or fewer bytes than others are on a logarithmic axis, as in `diloco plot`.
function farApart(shown, axis) {
  if (axis !== "bytes" || shown.length < 2) return false;
  const sent = shown.map(({ series }) => Math.max(0, ...series.communication.sent)).filter((bytes) => bytes > 0);
  return sent.length > 1 && Math.max(...sent) > FAR_APART * Math.min(...sent);
}

function drawLoss(shown, { axis, smoothing, log, each }) {
  const several = shown.length > 1, traces = [], weight = smoothingOf(shown, smoothing), wide = farApart(shown, axis);
  const at = (curve) => (wide ? curve[AXES[axis].key].map((x) => (x > 0 ? x : null)) : curve[AXES[axis].key]);
  shown.forEach(({ name, series, color }) => {
    const x = at(series.loss), workers = Object.entries(series.workers);
    if (!several && each && workers.length > 1) {
      workers.forEach(([worker, curve]) => traces.push(...smoothed(at(curve), curve.loss, weight,
        { name: `worker ${worker}`, color: ofWorker(worker), width: 1, opacity: 0.55 }).slice(-1).map((trace) => ({ ...trace, showlegend: workers.length <= 4 && innerWidth > 760 }))));
    } else if (!several && series.workers_in_means > 1) traces.push(...band(x, series.loss.low, series.loss.high, color));
    traces.push(...smoothed(x, series.loss.mean, weight, { name: several ? name : "training", color, width: 2 }));
    const validation = series.validation;
    traces.push(line(at(validation), validation.loss,
      { name: several ? `${name}, validation` : "validation", color: several ? color : colour("ink"), width: 1.2, dash: "dot", markers: true }));
  });
  show("loss", traces, { axis, log: wide, y: { type: log ? "log" : "linear", title: { text: "loss", font: { size: 11 } } }, legend: true, empty: "no step has been logged yet" });
}

function drawRates(shown, { axis, each, smoothing }) {
  const weight = smoothingOf(shown, smoothing), wide = farApart(shown, axis);
  for (const [id, key, y] of [["rate", "tokens_per_second", { rangemode: "tozero", tickformat: "~s" }], ["use", "utilization", { range: [0, 1.02], tickformat: ".0%" }]]) {
    const traces = [];
    shown.forEach(({ name, series, color }) => {
      const x = series.rates[AXES[axis].key];
      if (key === "utilization" && shown.length === 1 && !(each && Object.keys(series.rates.workers).length)) traces.push(...band(x, series.rates.utilization_low, series.rates.utilization_high, color));
      if (each && shown.length === 1 && series.workers_in_means > 1) {
        Object.entries(series.rates.workers).forEach(([worker, curve]) => traces.push(...smoothed(x, curve[key], weight,
          { name: `worker ${worker}`, color: ofWorker(worker), width: 1, opacity: 0.6 }).slice(-1)));
      }
      traces.push(...smoothed(x, series.rates[key], weight, { name: shown.length > 1 ? name : key === "utilization" ? "mean" : "all workers", color, width: 1.8 }));
    });
    show(id, traces, { axis, log: wide, y });
  }
}

// The number of the rounds that is chosen, over the run. The server tells which there are.
function drawStatistic({ rounds, statistics }, { axis }) {
  const choice = $("statistic");
  if (choice.options.length !== statistics.length) fill(choice, ...statistics.map(({ column, meaning }) => make("option", { value: column }, meaning)));
  const { column, label } = statistics.find((one) => one.column === choice.value);
  const known = rounds[column].some((value) => value !== null);
  show("statistics", known ? [line(rounds[AXES[axis].key], rounds[column], { name: label, color: PALETTE[0] })] : [], { axis, y: { rangemode: "tozero" }, empty: "no round has told it yet" });
}

function drawRounds(series, { axis }) {
  const x = AXES[axis].key, { rounds, communication, gradient_norm: gradient, learning_rate: rate } = series;
  const [blue, orange, , purple] = PALETTE, at = rounds[x];
  show("bytes", [
    line(communication[x], communication.data_parallel, { name: "data-parallel", color: orange, dash: "dash" }),
    line(communication[x], communication.sent, { name: "sent", color: blue, width: 2 }),
  ], { axis, y: { type: "log", tickformat: "~s", dtick: 1, ticksuffix: "B" }, legend: true });
  show("agreement", [
    ...band(at, rounds.cosine_low, rounds.cosine_high, blue),
    line(at, rounds.similarity, { name: "mean cosine", color: blue }),
    line(at, rounds.contributors, { name: "contributors", color: purple, axis: "y2", width: 1.2, dash: "dot" }),
  ], { axis, y: { title: { text: "cosine", font: { size: 11 } } }, y2: { rangemode: "tozero", tickformat: "d", nticks: 5, ...(Math.max(0, ...rounds.contributors) < 5 ? { dtick: 1 } : {}) }, legend: true, empty: "no round has been merged yet" });
  show("norms", [
    ...band(at, rounds.norm_low, rounds.norm_high, orange),
    line(at, rounds.norm_high, { name: "largest of a worker", color: orange, width: 1 }),
    line(at, rounds.mean_norm, { name: "of the mean", color: blue }),
  ], { axis, y: { rangemode: "tozero" }, legend: true, empty: "no round has been merged yet" });
  show("gradient", [
    ...band(gradient[x], gradient.low, gradient.high, blue),
    line(gradient[x], gradient.mean, { name: "gradient norm", color: blue }),
    line(rate[x], rate.mean, { name: "learning rate", color: purple, axis: "y2", width: 1.2, dash: "dot" }),
  ], { axis, y: { rangemode: "tozero" }, y2: { rangemode: "tozero", tickformat: ".1e", nticks: 4 }, legend: true });
}
