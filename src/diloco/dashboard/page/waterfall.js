// The rounds of each worker over time: inner steps, then what the round took. Straggler and failures stand out.
import { $, draw, fill, make } from "./dom.js";
import { clock, duration, plain, sinceStart, whole } from "./format.js";

const PHASES = ["compute", "encode", "send", "wait", "reduce", "merge"];
const ENGINE_PHASES = [["wait", "others"], ["send", "send"], ["reduce", "reduce"]]; // as drawn, as the log has it
const FLIGHT_SHARE = 0.05; // of a round: with more than this the worker trained while the engine worked
const LEFT = 64;
const TOP = 18;
const BOTTOM = 18;
const RIGHT = 8;
const MOST_FAILURES = 50;

// A pause before a resume takes no width.
export function drawWaterfall(target, rounds, state, warmStart = 0) {
  const all = rounds.flatMap((round) => round.workers.map((part) => ({ round, part, bars: barsOf(round, part) })));
  const parts = all.filter(({ bars }) => bars.length);
  if (!parts.length) {
    const text = warmStart ? `no round yet: the first ${whole(warmStart)} steps are a warm start` : "no round has ended yet";
    fill(target, make("p", { class: "empty" }, text));
    return;
  }
  const layout = layOut(parts, target.clientWidth, state);
  const svg = draw("svg", {
    viewBox: `0 0 ${layout.width} ${layout.height}`, height: layout.height, role: "img", "aria-label": describe(rounds),
  });
  drawFrame(svg, rounds, layout);
  for (const part of parts) drawPart(svg, part, layout);
  fill(target, svg, legend(parts));
}

function layOut(parts, availableWidth, state) {
  const workers = [...new Set(parts.map(({ part }) => part.worker))].sort((a, b) => a - b);
  const rowHeight = workers.length <= 12 ? 20 : workers.length <= 32 ? 13 : 9;
  const from = Math.min(...parts.map(({ bars }) => bars[0].from));
  const to = Math.max(...parts.flatMap(({ bars }) => bars.map((bar) => bar.to)));
  const width = Math.max(320, availableWidth);
  const height = TOP + workers.length * rowHeight + BOTTOM;
  const first = sinceStart(state, from);
  const seconds = sinceStart(state, to) - first;
  const scale = (width - LEFT - RIGHT) / Math.max(1e-9, seconds);
  const x = (time) => LEFT + (sinceStart(state, time) - first) * scale;
  return { workers, rowHeight, from, to, width, height, seconds, x };
}

function drawFrame(svg, rounds, { workers, rowHeight, from, to, width, height, seconds, x }) {
  const late = new Set(rounds.slice(-1).map((round) => round.straggler));
  const labelEvery = rowHeight > 12 ? 1 : rowHeight > 9 ? 2 : 8;
  workers.forEach((worker, index) => {
    if (index % labelEvery && !late.has(worker)) return;
    const y = TOP + index * rowHeight + rowHeight / 2 + 4;
    const kind = late.has(worker) ? "late" : "";
    svg.append(draw("text", { x: LEFT - 8, y, "text-anchor": "end", class: kind }, `worker ${worker}`));
  });
  for (const round of rounds) {
    const at = x(round.time);
    svg.append(draw("line", { x1: at, x2: at, y1: TOP - 4, y2: TOP + workers.length * rowHeight, class: "boundary" }));
    const labelled = rounds.length <= 24 || round.sequence % 5 === 0;
    if (labelled) svg.append(draw("text", { x: at, y: TOP - 7, "text-anchor": "end" }, String(round.sequence)));
  }
  const end = `${clock(to)} · ${duration(seconds)}`;
  svg.append(draw("text", { x: LEFT, y: height - 3 }, clock(from)));
  svg.append(draw("text", { x: width - RIGHT, y: height - 3, "text-anchor": "end" }, end));
}

function drawPart(svg, { round, part, bars }, { workers, rowHeight, x }) {
  const y = TOP + workers.indexOf(part.worker) * rowHeight + 1;
  const height = rowHeight - 2;
  for (const bar of bars) {
    const left = x(bar.from);
    const inset = bar.beside ? height * 0.6 : 0;
    const title = `round ${round.sequence}, worker ${part.worker}: ${bar.phase} ${duration(bar.to - bar.from)}`;
    svg.append(draw("rect", {
      x: left, y: y + inset, width: Math.max(0.6, x(bar.to) - left), height: height - inset, rx: rowHeight > 12 ? 2 : 0,
      class: bar.phase + (part.elsewhere ? " elsewhere" : ""),
    }, draw("title", {}, title)));
  }
  if (part.failure) {
    const left = x(bars[0].from);
    const width = Math.max(2, x(part.ended ?? bars.at(-1).to) - left);
    svg.append(draw("rect", { x: left, y, width, height, class: "failed" }, draw("title", {}, part.failure)));
  }
}

function legend(parts) {
  const seen = new Set(parts.flatMap(({ bars }) => bars.map((bar) => bar.phase)));
  const phases = PHASES.filter((phase) => seen.has(phase));
  const swatches = phases.map((phase) => make("span", { class: phase }, phase === "compute" ? "inner steps" : phase));
  const elsewhere = parts.some(({ part }) => part.elsewhere)
    ? make("em", {}, "lighter: of another machine, as it tells with its next round") : null;
  return make("div", { class: "key" }, ...swatches, elsewhere);
}

// The bars of one worker in one round, from left to right. `beside`: the engine works while the worker trains on.
// A worker of another machine tells the phases of a round with its next one; until then its inner steps alone are known.
function barsOf(round, part) {
  const { phases } = part;
  const compute = part.compute_seconds ?? 0;
  if (part.posted === null) return compute > 0 ? [{ phase: "compute", from: round.time - compute, to: round.time }] : [];
  const encode = phases.encode ?? 0;
  const flight = phases.flight ?? 0;
  const end = part.ended ?? part.posted;
  const merge = Math.min(phases.merge ?? 0, end - part.posted);
  const bars = [];
  const add = (phase, from, seconds, beside = false) => {
    const to = Math.min(end, from + seconds);
    if (seconds > 0 && from < end) bars.push({ phase, from, to, beside });
    return to;
  };
  if (part.started !== null) add("compute", part.started, Math.max(0, part.posted - encode - part.started));
  add("encode", part.posted - encode, encode);
  if (flight > FLIGHT_SHARE * (end - part.posted)) {
    const trained = add("compute", part.posted, flight);
    add("wait", trained, phases.wait ?? 0);
    let time = part.posted;
    for (const [phase, logged] of ENGINE_PHASES) time = add(phase, time, phases[logged] ?? 0, true);
  } else {
    let time = part.posted;
    for (const [phase, logged] of ENGINE_PHASES) {
      time = add(phase, time, Math.min(phases[logged] ?? 0, Math.max(0, end - merge - time)));
    }
    const waited = (phases.wait ?? 0) - (time - part.posted);
    add("wait", time, Math.max(0, Math.min(end - merge - time, waited)));
  }
  add("merge", end - merge, merge);
  return bars;
}

export function describe(rounds) {
  const last = rounds.at(-1);
  if (!last) return "";
  if (last.failure && !last.merged) return `round ${last.sequence} failed: ${last.failure}`;
  const late = last.workers.find((part) => part.worker === last.straggler);
  if (!late) return `round ${last.sequence}: no straggler`;
  const others = last.workers.filter((part) => part !== late && part.posted !== null);
  const waits = others.map((part) => Math.max(part.phases.wait ?? 0, part.phases.others ?? 0));
  const waited = waits.length ? `; the others waited up to ${duration(Math.max(...waits))}` : "";
  return `round ${last.sequence}: worker ${late.worker} was last after ${duration(late.compute_seconds)} of inner steps${waited}`;
}

export function drawFailures(rounds, state) {
  const failures = rounds.failures.map((failure) => ({
    ...failure, what: "failed", workers: failure.workers.join(", "),
    reason: failure.reason + (failure.merged_by_others ? " (other workers merged it)" : ""),
  }));
  const refusals = ["refused", "clipped"].flatMap((what) => rounds.refusals.flatMap((refusal) =>
    Object.entries(refusal[what]).map(([worker, reason]) => ({ ...refusal, what, workers: worker, reason }))));
  const rows = [...failures, ...refusals].sort((a, b) => b.sequence - a.sequence).slice(0, MOST_FAILURES);
  if (!rows.length) {
    fill($("failures"));
    return;
  }
  const head = make("tr", {}, ...["round", "after", "", "workers", "reason"].map((name) => make("th", {}, name)));
  const body = rows.map((row) => {
    const texts = [plain(row.sequence), duration(sinceStart(state, row.time)), row.what, row.workers, row.reason];
    return make("tr", {}, ...texts.map((text) => make("td", {}, text)));
  });
  fill($("failures"), make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}
