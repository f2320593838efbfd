// The rounds of each worker over time: inner steps, then what the round took. Straggler and failures stand out.
import { $, draw, fill, make } from "./dom.js";
import { clock, duration, plain, sinceStart, whole } from "./format.js";

const PHASES = ["compute", "encode", "send", "wait", "reduce", "merge"];
const LEFT = 64, TOP = 18;

// A pause before a resume takes no width.
export function drawWaterfall(target, rounds, state, warmStart = 0) {
  const parts = rounds.flatMap((round) => round.workers.map((part) => ({ round, part, bars: bars(round, part) }))).filter((one) => one.bars.length);
  if (!parts.length) {
    fill(target, make("p", { class: "empty" }, warmStart ? `no round yet: the first ${whole(warmStart)} steps are a warm start` : "no round has ended yet"));
    return;
  }
  const workers = [...new Set(parts.map(({ part }) => part.worker))].sort((a, b) => a - b);
  const row = workers.length <= 12 ? 20 : workers.length <= 32 ? 13 : 9;
  const from = Math.min(...parts.map(({ bars: [first] }) => first.from)), to = Math.max(...parts.flatMap(({ bars: all }) => all.map((bar) => bar.to)));
  const width = Math.max(320, target.clientWidth), height = TOP + workers.length * row + 18;
  const [first, last] = [sinceStart(state, from), sinceStart(state, to)];
  const x = (time) => LEFT + ((sinceStart(state, time) - first) / Math.max(1e-9, last - first)) * (width - LEFT - 8);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": describe(rounds) });
  drawFrame(svg, { workers, rounds, row, x, width, height, from, to, seconds: last - first });
  for (const { round, part, bars: all } of parts) {
    const y = TOP + workers.indexOf(part.worker) * row;
    for (const bar of all) {
      const left = x(bar.from), size = Math.max(0.6, x(bar.to) - left), inset = bar.beside ? (row - 2) * 0.6 : 0;
      svg.append(draw("rect", { x: left, y: y + 1 + inset, width: size, height: row - 2 - inset, rx: row > 12 ? 2 : 0, class: bar.phase + (part.elsewhere ? " elsewhere" : "") },
        draw("title", {}, `round ${round.sequence}, worker ${part.worker}: ${bar.phase} ${duration(bar.to - bar.from)}`)));
    }
    if (part.failure) svg.append(draw("rect", { x: x(all[0].from), y: y + 1, width: Math.max(2, x(part.ended ?? all.at(-1).to) - x(all[0].from)), height: row - 2, class: "failed" }, draw("title", {}, part.failure)));
  }
  const seen = new Set(parts.flatMap(({ bars: all }) => all.map((bar) => bar.phase)));
  fill(target, svg, make("div", { class: "key" }, ...PHASES.filter((phase) => seen.has(phase)).map((phase) => make("span", { class: phase }, phase === "compute" ? "inner steps" : phase)),
    parts.some(({ part }) => part.elsewhere) ? make("em", {}, "lighter: of another machine, as it tells with its next round") : null));
}

function drawFrame(svg, { workers, rounds, row, x, width, height, from, to, seconds }) {
  const late = new Set(rounds.slice(-1).map((round) => round.straggler)), every = row > 12 ? 1 : row > 9 ? 2 : 8;
  workers.forEach((worker, index) => {
    if (index % every && !late.has(worker)) return;
    svg.append(draw("text", { x: LEFT - 8, y: TOP + index * row + row / 2 + 4, "text-anchor": "end", class: late.has(worker) ? "late" : "" }, `worker ${worker}`));
  });
  for (const round of rounds) {
    const at = x(round.time);
    svg.append(draw("line", { x1: at, x2: at, y1: TOP - 4, y2: TOP + workers.length * row, class: "boundary" }));
    if (rounds.length <= 24 || round.sequence % 5 === 0) svg.append(draw("text", { x: at, y: TOP - 7, "text-anchor": "end" }, String(round.sequence)));
  }
  svg.append(draw("text", { x: LEFT, y: height - 3 }, clock(from)), draw("text", { x: width - 8, y: height - 3, "text-anchor": "end" }, `${clock(to)} · ${duration(seconds)}`));
}

// The bars of one worker in one round, from left to right. `beside`: the engine works while the worker trains on.
// A worker of another machine tells the phases of a round with its next one; until then its inner steps alone are known.
function bars(round, part) {
  const phases = part.phases, compute = part.compute_seconds ?? 0;
  if (part.posted === null) return compute > 0 ? [{ phase: "compute", from: round.time - compute, to: round.time }] : [];
  const all = [], end = part.ended ?? part.posted, encode = phases.encode ?? 0, flight = phases.flight ?? 0;
  const push = (phase, from, seconds, beside = false) => { if (seconds > 0 && from < end) all.push({ phase, from, to: Math.min(end, from + seconds), beside }); return Math.min(end, from + seconds); };
  if (part.started !== null) push("compute", part.started, Math.max(0, part.posted - encode - part.started));
  push("encode", part.posted - encode, encode);
  const engine = ["others", "send", "reduce"].map((phase) => [phase === "others" ? "wait" : phase, phases[phase] ?? 0]);
  const merge = Math.min(phases.merge ?? 0, end - part.posted);
  let time = part.posted;
  if (flight > 0.05 * (end - part.posted)) {
    time = push("compute", time, flight);
    time = push("wait", time, phases.wait ?? 0);
    let beside = part.posted;
    for (const [phase, seconds] of engine) beside = push(phase, beside, seconds, true);
  } else {
    for (const [phase, seconds] of engine) time = push(phase, time, Math.min(seconds, Math.max(0, end - merge - time)));
    time = push("wait", time, Math.max(0, Math.min(end - merge - time, (phases.wait ?? 0) - (time - part.posted))));
  }
  push("merge", end - merge, merge);
  return all;
}

export function describe(rounds) {
  const last = rounds.at(-1);
  if (!last) return "";
  const late = last.workers.find((part) => part.worker === last.straggler);
  const waits = last.workers.filter((part) => part !== late && part.posted !== null).map((part) => Math.max(part.phases.wait ?? 0, part.phases.others ?? 0));
  const waited = waits.length ? `; the others waited up to ${duration(Math.max(...waits))}` : "";
  const slow = late ? `worker ${late.worker} was last after ${duration(late.compute_seconds)} of inner steps${waited}` : "no straggler";
  return last.failure && !last.merged ? `round ${last.sequence} failed: ${last.failure}` : `round ${last.sequence}: ${slow}`;
}

export function drawFailures(rounds, state) {
  const rows = [
    ...rounds.failures.map((one) => [one.sequence, one.time, "failed", `${one.reason}${one.merged_by_others ? " (other workers merged it)" : ""}`, one.workers.join(", ")]),
    ...["refused", "clipped"].flatMap((what) => rounds.refusals.flatMap((one) => Object.entries(one[what]).map(([worker, reason]) => [one.sequence, one.time, what, reason, worker]))),
  ].sort((a, b) => b[0] - a[0]).slice(0, 50);
  if (!rows.length) { fill($("failures")); return; }
  const head = make("tr", {}, ...["round", "after", "", "workers", "reason"].map((name) => make("th", {}, name)));
  const body = rows.map(([sequence, time, what, reason, workers]) => make("tr", {}, ...[plain(sequence), duration(sinceStart(state, time)), what, workers, reason].map((text) => make("td", {}, text))));
  fill($("failures"), make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}
