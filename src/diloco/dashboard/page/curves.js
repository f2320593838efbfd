// Which curves each panel shows. `shown`: [{ name, series, color }], the run in focus first.
import { AXES, band, line, PALETTE, show, smoothed } from "./charts.js";
import { $, colour, fill, make } from "./dom.js";

const FAR_APART = 8;
const FEW_POINTS = 300;
const DEFAULT_SMOOTHING = 0.6;
const NO_ROUND = "no round has been merged yet";

const colorOfWorker = (worker) => PALETTE[(Number(worker) + 1) % PALETTE.length];
const title = (text) => ({ text, font: { size: 11 } });

export function drawCurves(shown, options) {
  if (!shown.length) return;
  const { series } = shown[0];
  drawLoss(shown, options);
  drawRates(shown, options);
  drawBytes(series, options);
  drawAgreement(series, options);
  drawNorms(series, options);
  drawGradient(series, options);
  drawStatistic(series, options);
}

// The smoothing that was chosen; else none where the points are few, since a smoothed curve is late and may lie on the
// wrong side.
export function smoothingOf(shown, chosen) {
  if (chosen !== null) return chosen;
  return Math.max(0, ...shown.map(({ series }) => series.loss.step.length)) < FEW_POINTS ? 0 : DEFAULT_SMOOTHING;
}

// Runs that sent far more or fewer bytes than others are on a logarithmic axis, as in `diloco plot`.
function farApart(shown, axis) {
  if (axis !== "bytes" || shown.length < 2) return false;
  const sent = shown.map(({ series }) => Math.max(0, ...series.communication.sent)).filter((bytes) => bytes > 0);
  return sent.length > 1 && Math.max(...sent) > FAR_APART * Math.min(...sent);
}

function drawLoss(shown, { axis, smoothing, log, each }) {
  const several = shown.length > 1;
  const weight = smoothingOf(shown, smoothing);
  const logarithmic = farApart(shown, axis);
  const xOf = (curve) => {
    const x = curve[AXES[axis].key];
    return logarithmic ? x.map((value) => (value > 0 ? value : null)) : x;
  };
  const traces = [];
  for (const { name, series, color } of shown) {
    const x = xOf(series.loss);
    const workers = Object.entries(series.workers);
    if (!several && each && workers.length > 1) {
      const showlegend = workers.length <= 4 && innerWidth > 760;
      for (const [worker, curve] of workers) {
        const options = { name: `worker ${worker}`, color: colorOfWorker(worker), width: 1, opacity: 0.55 };
        traces.push({ ...smoothed(xOf(curve), curve.loss, weight, options).at(-1), showlegend });
      }
    } else if (!several && series.workers_in_means > 1) {
      traces.push(...band(x, series.loss.low, series.loss.high, color));
    }
    traces.push(...smoothed(x, series.loss.mean, weight, { name: several ? name : "training", color, width: 2 }));
    traces.push(line(xOf(series.validation), series.validation.loss, {
      name: several ? `${name}, validation` : "validation", color: several ? color : colour("ink"), width: 1.2, dash: "dot",
      markers: true,
    }));
  }
  const y = { type: log ? "log" : "linear", title: title("loss") };
  show("loss", traces, { axis, log: logarithmic, y, legend: true, empty: "no step has been logged yet" });
}

function drawRates(shown, options) {
  drawRate("rate", "tokens_per_second", "all workers", { rangemode: "tozero", tickformat: "~s" }, shown, options);
  drawRate("use", "utilization", "mean", { range: [0, 1.02], tickformat: ".0%" }, shown, options);
}

function drawRate(id, key, nameOfAll, y, shown, { axis, each, smoothing }) {
  const several = shown.length > 1;
  const weight = smoothingOf(shown, smoothing);
  const traces = [];
  for (const { name, series, color } of shown) {
    const { rates } = series;
    const x = rates[AXES[axis].key];
    const workers = each ? Object.entries(rates.workers) : [];
    if (!several && key === "utilization" && !workers.length) {
      traces.push(...band(x, rates.utilization_low, rates.utilization_high, color));
    }
    if (!several && series.workers_in_means > 1) {
      for (const [worker, curve] of workers) {
        const options = { name: `worker ${worker}`, color: colorOfWorker(worker), width: 1, opacity: 0.6 };
        traces.push(smoothed(x, curve[key], weight, options).at(-1));
      }
    }
    traces.push(...smoothed(x, rates[key], weight, { name: several ? name : nameOfAll, color, width: 1.8 }));
  }
  show(id, traces, { axis, log: farApart(shown, axis), y });
}

function drawBytes({ communication }, { axis }) {
  const [blue, orange] = PALETTE;
  const x = communication[AXES[axis].key];
  show("bytes", [
    line(x, communication.data_parallel, { name: "data-parallel", color: orange, dash: "dash" }),
    line(x, communication.sent, { name: "sent", color: blue, width: 2 }),
  ], { axis, y: { type: "log", tickformat: "~s", dtick: 1, ticksuffix: "B" }, legend: true });
}

function drawAgreement({ rounds }, { axis }) {
  const [blue, , , purple] = PALETTE;
  const x = rounds[AXES[axis].key];
  const fewContributors = Math.max(0, ...rounds.contributors) < 5;
  show("agreement", [
    ...band(x, rounds.cosine_low, rounds.cosine_high, blue),
    line(x, rounds.similarity, { name: "mean cosine", color: blue }),
    line(x, rounds.contributors, { name: "contributors", color: purple, axis: "y2", width: 1.2, dash: "dot" }),
  ], {
    axis, y: { title: title("cosine") }, legend: true, empty: NO_ROUND,
    y2: { rangemode: "tozero", tickformat: "d", nticks: 5, ...(fewContributors ? { dtick: 1 } : {}) },
  });
}

function drawNorms({ rounds }, { axis }) {
  const [blue, orange] = PALETTE;
  const x = rounds[AXES[axis].key];
  show("norms", [
    ...band(x, rounds.norm_low, rounds.norm_high, orange),
    line(x, rounds.norm_high, { name: "largest of a worker", color: orange, width: 1 }),
    line(x, rounds.mean_norm, { name: "of the mean", color: blue }),
  ], { axis, y: { rangemode: "tozero" }, legend: true, empty: NO_ROUND });
}

function drawGradient({ gradient_norm: gradient, learning_rate: rate }, { axis }) {
  const [blue, , , purple] = PALETTE;
  const x = gradient[AXES[axis].key];
  show("gradient", [
    ...band(x, gradient.low, gradient.high, blue),
    line(x, gradient.mean, { name: "gradient norm", color: blue }),
    line(rate[AXES[axis].key], rate.mean, { name: "learning rate", color: purple, axis: "y2", width: 1.2, dash: "dot" }),
  ], { axis, y: { rangemode: "tozero" }, y2: { rangemode: "tozero", tickformat: ".1e", nticks: 4 }, legend: true });
}

// The number of the rounds that is chosen, over the run. The server sends the list of them.
function drawStatistic({ rounds, statistics }, { axis }) {
  const choice = $("statistic");
  if (choice.options.length !== statistics.length) {
    fill(choice, ...statistics.map(({ column, meaning }) => make("option", { value: column }, meaning)));
  }
  const { column, label } = statistics.find((statistic) => statistic.column === choice.value);
  const values = rounds[column];
  const measured = values.some((value) => value !== null);
  const traces = measured ? [line(rounds[AXES[axis].key], values, { name: label, color: PALETTE[0] })] : [];
  show("statistics", traces, { axis, y: { rangemode: "tozero" }, empty: "no round has told it yet" });
}
