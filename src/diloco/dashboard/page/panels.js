// The panels of words and single numbers.
import { $, facts, fill, make, say } from "./dom.js";
import { ago, bits, bytes, clock, date, duration, missing, plain, share, short, sinceStart, whole } from "./format.js";

const STATUS = {
  training: ["training", "live"], starting: ["starting", "live"], complete: ["complete", "good"],
  stopped: ["stopped", "warning"], failed: ["failed", "bad"], silent: ["no events lately", "warning"],
  empty: ["not started", ""],
};
const RUNNING = ["training", "starting", "silent"];
const OLD_SECONDS = 60;

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

export function drawStatus(state, isReplay) {
  const [text, kind] = STATUS[state.status] ?? [state.status, ""];
  const pill = $("status");
  pill.textContent = isReplay ? "replay" : text;
  pill.className = `pill ${isReplay ? "warning" : kind}`;
  pill.title = state.error ?? "";
  const problems = [...state.problems];
  if (state.error) problems.push(`The run failed: ${state.error}`);
  $("problems").hidden = !problems.length;
  fill($("problems"), ...problems.map((problem) => make("p", {}, problem)));
}

// Whether all is well, in one line: what is not is red.
export function drawHealth(state, { fetched, connected }, isReplay) {
  const { health, rounds, status } = state;
  const running = RUNNING.includes(status);
  const items = [];
  const add = (text, kind) => items.push(make("span", { class: `fact ${kind}` }, text));
  if (health.all && running) {
    add(`${health.present} of ${count(health.all, "worker")} here`, health.present < health.all ? "warning" : "good");
  } else if (health.all) add(count(health.all, "worker"), "");
  if (health.lost.length) add(`lost or failed: ${health.lost.join(", ")}`, "bad");
  if (health.left.length) add(`left: ${health.left.join(", ")}`, "");
  if (health.not_finite.length) add(`the loss of worker ${health.not_finite.join(", ")} is not a number`, "bad");
  if (rounds.failed) add(`${count(rounds.failed, "round")} failed`, "bad");
  if (rounds.refused) add(`${count(rounds.refused, "contribution")} refused`, "bad");
  if (rounds.digests_unequal.length) add(`anchors differed in ${count(rounds.digests_unequal.length, "round")}`, "bad");
  if (status === "failed") add("the run failed", "bad");
  if (state.doing && running) add(state.doing, "busy");
  if (state.last_time !== null) {
    const age = state.now - state.last_time + (Date.now() - fetched) / 1000;
    add(`last event ${ago(age)}`, running && age > OLD_SECONDS && !isReplay ? "bad" : "");
  }
  if (!connected) add("disconnected: the server does not answer; trying again", "bad");
  fill($("health"), ...items);
}

// Each figure: label, value, a smaller line, and how that line is coloured.

export function drawFigures(state) {
  const { validation, rounds } = state;
  const done = state.steps ? state.step / state.steps : 0;
  const workersHere = state.workers.filter((worker) => worker.local).length || state.workers.length;
  const figures = [
    ["perplexity", plain(validation?.perplexity), validation ? `at step ${whole(validation.step)}` : "not measured yet"],
    ["training loss", plain(state.loss),
      state.unigram_perplexity ? `unigrams: ${plain(Math.log(state.unigram_perplexity))}` : "mean of the workers"],
    ["step", whole(state.step), state.steps ? `of ${whole(state.steps)} · ${share(done)}` : ""],
    timeFigure(state),
    ["tokens/s", short(state.tokens_per_second),
      state.run_tokens === null ? `${short(state.tokens)} tokens` : `${short(state.run_tokens)} in means`],
    ["utilisation", share(state.utilization), `${count(workersHere, "worker")}${workersHere < state.workers.length ? " here" : ""}`],
    ["rounds", whole(rounds.merged),
      rounds.failed || rounds.refused ? `${rounds.failed} failed, ${rounds.refused} refused` : "none failed",
      rounds.failed ? "bad" : ""],
    bytesFigure(state),
  ];
  const boxes = figures.map(([label, value, more, kind]) => make("div", { class: "figure" },
    make("div", { class: "label" }, label),
    make("div", { class: "value" }, value),
    make("div", { class: `more ${kind ?? ""}` }, more || "\u00a0")));
  const bar = state.steps ? make("progress", { max: 1, value: Math.min(1, done), "aria-label": "progress" }) : null;
  fill($("figures"), ...boxes, bar);
}

function timeFigure(state) {
  const training = state.status === "training";
  const more = training ? `${duration(state.seconds)} so far` : state.first_time ? date(state.first_time) : "";
  if (training && state.seconds_left) return ["time left", duration(state.seconds_left), more];
  return ["time", duration(state.seconds), more];
}

function bytesFigure(state) {
  const { reduction, bytes_sent_per_worker: sent } = state.communication;
  const dataParallel = state.mode === "data-parallel";
  if (dataParallel || !reduction) return ["sent by a worker", sent ? bytes(sent) : missing, dataParallel ? "data-parallel" : ""];
  const times = reduction >= 1 ? reduction : 1 / reduction;
  const label = reduction >= 1 ? "fewer bytes" : "more bytes";
  return [label, `${times < 1000 ? plain(times, 3) : short(times)}×`, `${bytes(sent)} a worker`];
}

export function drawCommunication(state) {
  const { communication } = state;
  const saved = state.mode !== "data-parallel" && communication.reduction >= 1;
  say("bytes-note", saved ? `${plain(communication.reduction, 3)}× less than data-parallel with ${communication.workers} workers` : "");
  const used = communication.link_share ? ` (${share(communication.link_share)} used)` : "";
  fill($("links"), ...facts([
    ["sent by a worker", bytes(communication.bytes_sent_per_worker)],
    ["data-parallel would have sent", bytes(communication.data_parallel_bytes_per_worker)],
    ["on average", bits(communication.mean_bytes_per_second)],
    ["data-parallel would need", bits(communication.data_parallel_bytes_per_second)],
    ["the link carried, at best", bits(communication.link_bytes_per_second) + used],
  ]));
}

export function drawAgreement(state) {
  const { rounds } = state;
  const { last } = rounds;
  say("agreement-note", "cosines of the workers' outer gradients");
  const rows = [anchorsFact(rounds), ...lastDigestsFacts(state.last_digests)];
  rows.push(["contributions refused", whole(rounds.refused), rounds.refused ? "bad" : null]);
  if (rounds.clipped) rows.push(["contributions clipped", whole(rounds.clipped)]);
  if (last) rows.push(["last round", [count(last.contributors.length, "contributor"), ...rounds.last_statistics].join(", ")]);
  fill($("digests"), ...facts(rows));
}

function anchorsFact(rounds) {
  const label = "anchors compared";
  const unequal = rounds.digests_unequal;
  if (!rounds.digests_compared) return [label, missing, null];
  if (!unequal.length) return [label, `equal in all ${whole(rounds.digests_compared)} rounds`, "good"];
  const named = unequal.map((round) => `round ${round.sequence} (worker ${round.workers.join(", ")})`);
  return [label, `differed in ${named.slice(-3).join("; ")}`, "bad"];
}

function lastDigestsFacts(digestOfWorker) {
  const workers = Object.keys(digestOfWorker);
  const digests = [...new Set(Object.values(digestOfWorker))];
  if (!workers.length) return [];
  if (digests.length > 1) return [["last parameters", `${digests.length} different digests`, "bad"]];
  return [["last parameters", `the same on ${workers.length} workers (${digests[0].slice(0, 12)})`, "good"]];
}

export function drawNotes(state) {
  say("notes-note", state.notes.length ? "newest first" : "");
  const items = [...state.notes].reverse().map((note) => make("li", {},
    make("time", { title: clock(note.time) }, duration(sinceStart(state, note.time))),
    make("span", { class: `dot ${note.kind === "info" ? "" : note.kind}` }),
    make("span", {}, note.text)));
  fill($("notes"), ...(items.length ? items : [make("li", { class: "empty" }, "nothing besides steps and rounds")]));
}

export function drawSamples(state) {
  say("samples-note", state.samples.length > 1 ? "newest first" : "");
  const items = [...state.samples].reverse().map((sample) => {
    const prompt = sample.prompt ?? "";
    const text = sample.text ?? "";
    const when = sample.step ? `step ${whole(sample.step)}` : `after ${duration(sinceStart(state, sample.time))}`;
    return make("div", { class: "sample" },
      make("div", { class: "quiet" }, when),
      make("pre", {}, make("span", { class: "prompt" }, prompt), text.startsWith(prompt) ? text.slice(prompt.length) : text));
  });
  const hint = "no sample yet: a run writes one at its end, and during training with training.sample_interval";
  fill($("samples"), ...(items.length ? items : [make("p", { class: "empty" }, hint)]));
}

export function drawConfig({ options, resolved }) {
  const wanted = $("config-filter").value.trim().toLowerCase();
  const groups = new Map();
  for (const [key, value] of Object.entries(options)) {
    const text = value === null ? "none" : String(value);
    if (!`${key} ${text}`.toLowerCase().includes(wanted)) continue;
    const dot = key.indexOf(".");
    const group = dot < 0 ? "run" : key.slice(0, dot);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([key.slice(dot + 1), text]);
  }
  say("config-note", resolved ? "as resolved when training started" : "config.toml");
  const option = ([name, value]) => make("div", { class: "option" }, make("span", {}, name), make("span", {}, value));
  fill($("config"), ...[...groups].flatMap(([group, rows]) => [make("h3", {}, group), ...rows.map(option)]));
}
