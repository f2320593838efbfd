// The panels of words and single numbers.
import { $, facts, fill, make, say } from "./dom.js";
import { bits, bytes, clock, date, duration, missing, plain, share, short, whole } from "./format.js";

const STATUS = {
  training: ["training", "live"], starting: ["starting", "live"], complete: ["complete", "good"], stopped: ["stopped", "warning"],
  failed: ["failed", "bad"], silent: ["no events lately", "warning"], empty: ["not started", ""],
};

export function drawStatus(state, replaying) {
  const [text, kind] = STATUS[state.status] ?? [state.status, ""], pill = $("status");
  pill.textContent = replaying ? "replay" : text;
  pill.className = `pill ${replaying ? "warning" : kind}`;
  pill.title = state.error ?? "";
  const problems = [...state.problems, ...(state.error ? [`The run failed: ${state.error}`] : [])];
  $("problems").hidden = !problems.length;
  fill($("problems"), ...problems.map((text) => make("p", {}, text)));
}

export function drawFigures(state) {
  const { validation, rounds, communication } = state, done = state.steps ? state.step / state.steps : 0;
  const workers = state.workers.filter((one) => one.active).length || state.workers.length;
  const figures = [
    ["perplexity", plain(validation?.perplexity), validation ? `at step ${whole(validation.step)}` : "not measured yet"],
    ["training loss", plain(state.loss), state.unigram_perplexity ? `unigrams: ${plain(Math.log(state.unigram_perplexity))}` : "mean of the workers"],
    ["step", whole(state.step), state.steps ? `of ${whole(state.steps)} · ${share(done)}` : "", ""],
    [state.seconds_left && state.status === "training" ? "time left" : "time", duration(state.status === "training" && state.seconds_left ? state.seconds_left : state.seconds), state.status === "training" ? `${duration(state.seconds)} so far` : state.first_time ? date(state.first_time) : ""],
    ["tokens/s", short(state.tokens_per_second), `${short(state.tokens)} tokens`],
    ["utilisation", share(state.utilization), `${workers} worker${workers === 1 ? "" : "s"}`],
    ["rounds", whole(rounds.merged), rounds.failed || rounds.refused ? `${rounds.failed} failed, ${rounds.refused} refused` : "none failed", rounds.failed ? "bad" : ""],
    ["fewer bytes", communication.reduction ? `${communication.reduction < 1000 ? plain(communication.reduction, 3) : short(communication.reduction)}×` : missing, `${bytes(communication.bytes_sent_per_worker)} a worker`],
  ];
  fill($("figures"), ...figures.map(([label, value, more, kind]) => make("div", { class: "figure" },
    make("div", { class: "label" }, label), make("div", { class: "value" }, value), make("div", { class: `more ${kind ?? ""}` }, more || "\u00a0"))),
  state.steps ? make("progress", { max: 1, value: Math.min(1, done), "aria-label": "progress" }) : null);
}

export function drawCommunication(state) {
  const { communication: one } = state;
  say("bytes-note", one.reduction ? `${plain(one.reduction, 3)}× less than data-parallel with ${one.workers} workers` : "");
  fill($("links"), ...facts([
    ["sent by a worker", bytes(one.bytes_sent_per_worker)],
    ["data-parallel would have sent", bytes(one.data_parallel_bytes_per_worker)],
    ["on average", bits(one.mean_bytes_per_second)],
    ["data-parallel would need", bits(one.data_parallel_bytes_per_second)],
    ["the link carried, at best", `${bits(one.link_bytes_per_second)}${one.link_share ? ` (${share(one.link_share)} used)` : ""}`],
  ]));
}

export function drawAgreement(state) {
  const { rounds, last_digests: final } = state, digests = new Set(Object.values(final));
  const unequal = rounds.digests_unequal, last = rounds.last;
  say("agreement-note", "cosines of the workers' outer gradients");
  fill($("digests"), ...facts([
    ["anchors compared", rounds.digests_compared ? unequal.length ? `differed in ${unequal.map((one) => `round ${one.sequence} (worker ${one.workers.join(", ")})`).slice(-3).join("; ")}` : `equal in all ${whole(rounds.digests_compared)} rounds` : missing, rounds.digests_compared ? (unequal.length ? "bad" : "good") : null],
    Object.keys(final).length ? ["last parameters", digests.size === 1 ? `the same on ${Object.keys(final).length} workers (${[...digests][0].slice(0, 12)})` : `${digests.size} different digests`, digests.size === 1 ? "good" : "bad"] : null,
    ["contributions refused", whole(rounds.refused), rounds.refused ? "bad" : null],
    rounds.clipped ? ["contributions clipped", whole(rounds.clipped)] : null,
    last ? ["last round", `${last.contributors.length} contributor${last.contributors.length === 1 ? "" : "s"}, cosine ${plain(last.similarity, 3)}, ${duration(last.seconds)}`] : null,
    last && last.codec_error !== null ? ["codec error", plain(last.codec_error, 3)] : null,
  ].filter(Boolean)));
}

export function drawNotes(state) {
  const start = state.first_time ?? 0;
  say("notes-note", state.notes.length ? "newest first" : "");
  fill($("notes"), ...[...state.notes].reverse().map((note) => make("li", {},
    make("time", { title: clock(note.time) }, duration(note.time - start)), make("span", { class: `dot ${note.kind === "info" ? "" : note.kind}` }), make("span", {}, note.text))));
  if (!state.notes.length) fill($("notes"), make("li", { class: "empty" }, "nothing besides steps and rounds"));
}

export function drawSamples(state) {
  say("samples-note", state.samples.length > 1 ? "newest first" : "");
  fill($("samples"), ...[...state.samples].reverse().map((one) => make("div", { class: "sample" },
    make("div", { class: "quiet" }, one.step ? `step ${whole(one.step)}` : `after ${duration(one.time - state.first_time)}`),
    make("pre", {}, make("span", { class: "prompt" }, one.prompt ?? ""), String(one.text ?? "").startsWith(one.prompt ?? "\u0000") ? one.text.slice((one.prompt ?? "").length) : one.text ?? ""))));
  if (!state.samples.length) fill($("samples"), make("p", { class: "empty" }, "no sample yet: a run writes one at its end, and during training with training.sample_interval"));
}

export function drawConfig({ options, resolved }) {
  const wanted = $("config-filter").value.trim().toLowerCase(), groups = new Map();
  for (const [key, value] of Object.entries(options)) {
    const text = value === null ? "none" : String(value), [group, name] = key.includes(".") ? [key.slice(0, key.indexOf(".")), key.slice(key.indexOf(".") + 1)] : ["run", key];
    if (wanted && !`${key} ${text}`.toLowerCase().includes(wanted)) continue;
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([name, text]);
  }
  say("config-note", resolved ? "as resolved when training started" : "config.toml");
  fill($("config"), ...[...groups].flatMap(([group, rows]) => [make("h3", {}, group), ...rows.map(([name, value]) => make("div", { class: "option" }, make("span", {}, name), make("span", {}, value)))]));
}
