// Line charts in the look of the page, drawn by plotly. A chart is a list of traces with x, y and a colour.
import { $, colour, fill, make } from "./dom.js";
import { duration } from "./format.js";

export const PALETTE = [
  "#3a75b5", "#d1742f", "#3b9469", "#b25b93", "#c29a2b", "#5aa9c9", "#7a6bb5", "#a0604a", "#6c8a3d", "#c2586b", "#4f7f86",
];
const TICK_SECONDS = [
  1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800,
];
const MOST_TICKS = 8;
export const AXES = {
  step: { label: "step", key: "step" },
  tokens: { label: "tokens", key: "tokens" },
  bytes: { label: "bytes sent by a worker", key: "bytes" },
  seconds: { label: "time", key: "seconds" },
};

const LINE = { name: "", width: 1.6, dash: "solid", opacity: 1, axis: "y", markers: false, hover: null };

export function line(x, y, options = {}) {
  const { name, color, width, dash, opacity, axis, markers, hover } = { ...LINE, ...options };
  const trace = {
    type: "scatter", x, y, name: escapeText(name), opacity, yaxis: axis, mode: markers ? "lines+markers" : "lines",
    connectgaps: false, line: { color, width, dash }, hovertemplate: hover ?? `%{y:.4~g}<extra>${escapeHover(name)}</extra>`,
  };
  if (markers) trace.marker = { color, size: 6, line: { color: colour("panel"), width: 1.2 } };
  return trace;
}

// The area between two curves, without lines of its own.
export function band(x, low, high, color) {
  const quiet = { type: "scatter", x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [{ ...quiet, y: low }, { ...quiet, y: high, fill: "tonexty", fillcolor: fade(color, 0.14) }];
}

export function fade(color, alpha) {
  const value = parseInt(color.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${alpha})`;
}

// Plotly reads a little HTML in names: a name from a run must not be any.
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const escapeText = (text) => String(text).replace(/[&<>]/g, (sign) => ESCAPES[sign]);
const escapeHover = (text) => escapeText(text).replaceAll("%", "&#37;"); // there % begins a value

// A colour for each run, by its name: the same whatever else is shown, and after a reload. Two runs that are shown
// together and would have the same one get different ones, which they keep.
export function colours(root) {
  const key = `diloco-colours ${root}`;
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(key)) ?? {}; } catch { /* private windows keep nothing */ }
  return (name, shown) => {
    if (!(name in kept)) {
      const taken = new Set(shown.filter((other) => other !== name && other in kept).map((other) => kept[other]));
      let place = hash(name) % PALETTE.length;
      for (let tries = 0; taken.has(place) && tries < PALETTE.length; tries++) place = (place + 1) % PALETTE.length;
      kept[name] = place;
      try { localStorage.setItem(key, JSON.stringify(kept)); } catch { /* as above */ }
    }
    return PALETTE[kept[name] % PALETTE.length];
  };
}

function hash(text) {
  let value = 2166136261;
  for (const letter of text) value = Math.imul(value ^ letter.codePointAt(0), 16777619) >>> 0;
  return value;
}

// The curve; smoothed, with what was measured behind it and both values in the tooltip.
export function smoothed(x, values, weight, options) {
  if (!weight) return [line(x, values, options)];
  const hover = `%{y:.4~g} (measured %{customdata:.4~g})<extra>${escapeHover(options.name ?? "")}</extra>`;
  const raw = line(x, values, { ...options, name: "", width: 1, opacity: 0.25 });
  return [{ ...raw, hoverinfo: "skip", hovertemplate: null, showlegend: false },
    { ...line(x, smooth(values, weight), { ...options, hover }), customdata: values }];
}

export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

const CHART = { axis: "step", log: false, y: {}, y2: null, legend: false, empty: "nothing yet" };

// Draws a chart into the element `id`, or the text `empty` if there are no points. `log`: a logarithmic x axis.
export function show(id, traces, options = {}) {
  const { axis, log, y, y2, legend, empty } = { ...CHART, ...options };
  const target = $(id);
  if (!traces.some((trace) => trace.x?.length)) {
    if (target.querySelector(".main-svg")) window.Plotly.purge(target);
    fill(target, make("p", { class: "empty" }, empty));
    return;
  }
  target.querySelector(".empty")?.remove();
  const lineColor = colour("line");
  const hoverFont = { color: colour("ink"), size: 12, family: colour("sans") };
  const grid = { gridcolor: colour("grid"), zeroline: false, linecolor: lineColor, tickcolor: lineColor, automargin: true };
  const x = log ? logAxis(axis) : xAxis(axis, traces);
  const layout = {
    margin: { l: 46, r: y2 ? 46 : 8, t: legend ? 26 : 8, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified", showlegend: legend,
    font: { family: colour("sans"), size: 11, color: colour("soft") },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)", font: { size: 11 } },
    hoverlabel: { bgcolor: colour("panel"), bordercolor: lineColor, font: hoverFont },
    xaxis: { ...grid, showgrid: false, ...x, spikecolor: colour("faint"), spikethickness: -2 },
    yaxis: { ...grid, ...y },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    uirevision: axis + log + (y.type ?? ""),
  };
  if (y2) {
    const tickmode = y2.dtick ? "linear" : "auto";
    layout.yaxis2 = { ...grid, tickmode, showgrid: false, overlaying: "y", side: "right", ...y2 };
  }
  window.Plotly.react(target, traces, layout, { displayModeBar: false, responsive: true, doubleClick: "reset" });
}

const titleOf = (axis) => ({ text: AXES[axis].label, font: { size: 11, color: colour("faint") }, standoff: 6 });
const logAxis = (axis) => ({
  title: titleOf(axis), type: "log", exponentformat: "SI", ticksuffix: "B", hoverformat: ".3~s", dtick: 1,
});

function xAxis(axis, traces) {
  const title = titleOf(axis);
  if (axis !== "seconds") return { title, tickformat: "~s", hoverformat: axis === "step" ? ",d" : ".3~s" };
  let longest = 0;
  for (const trace of traces) for (const x of trace.x ?? []) if (x > longest) longest = x;
  const every = TICK_SECONDS.find((seconds) => longest / seconds <= MOST_TICKS) ?? longest / 6;
  const ticks = Array.from({ length: Math.floor(longest / every) + 1 }, (_, index) => index * every);
  return { title, tickvals: ticks, ticktext: ticks.map(duration), hoverformat: ",.0f" };
}
