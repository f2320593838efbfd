// The panels of words and single numbers.
import { $, facts, fill, make, say } from "./dom.js";
import { ago, bits, bytes, clock, date, duration, missing, plain, share, short, sinceStart, whole } from "./format.js";

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

// Whether all is well, in one line: what is not is red.
export function drawHealth(state, { fetched, connected }, replaying) {
  const { health, rounds, status } = state, running = ["training", "starting", "silent"].includes(status), plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  const age = state.last_time === null ? null : state.now - state.last_time + (Date.now() - fetched) / 1000;
  const facts = [
    !health.all ? null : running ? [`${health.present} of ${plural(health.all, "worker")} here`, health.present < health.all ? "warning" : "good"] : [plural(health.all, "worker"), ""],
    health.lost.length ? [`lost or failed: ${health.lost.join(", ")}`, "bad"] : null,
    health.left.length ? [`left: ${health.left.join(", ")}`, ""] : null,
    health.not_finite.length ? [`the loss of worker ${health.not_finite.join(", ")} is not a number`, "bad"] : null,
    rounds.failed ? [`${plural(rounds.failed, "round")} failed`, "bad"] : null,
    rounds.refused ? [`${plural(rounds.refused, "contribution")} refused`, "bad"] : null,
    rounds.digests_unequal.length ? [`anchors differed in ${plural(rounds.digests_unequal.length, "round")}`, "bad"] : null,
    status === "failed" ? ["the run failed", "bad"] : null,
    state.doing && running ? [state.doing, "busy"] : null,
    age === null ? null : [`last event ${ago(age)}`, running && age > 60 && !replaying ? "bad" : ""],
    connected ? null : ["disconnected: the server does not answer; trying again", "bad"],
  ].filter(Boolean);
  fill($("health"), ...facts.map(([text, kind]) => make("span", { class: `fact ${kind}` }, text)));
}

function sent(state) {
  const { reduction, bytes_sent_per_worker: count } = state.communication;
  if (state.mode === "data-parallel" || !reduction) return ["sent by a worker", count ? bytes(count) : missing, state.mode === "data-parallel" ? "data-parallel" : ""];
  const times = reduction >= 1 ? reduction : 1 / reduction;
  return [reduction >= 1 ? "fewer bytes" : "more bytes", `${times < 1000 ? plain(times, 3) : short(times)}×`, `${bytes(count)} a worker`];
}

export function drawFigures(state) {
  const { validation, rounds } = state, done = state.steps ? state.step / state.steps : 0;
  const workers = state.workers.filter((one) => one.active).length || state.workers.length;
  const figures = [
    ["perplexity", plain(validation?.perplexity), validation ? `at step ${whole(validation.step)}` : "not measured yet"],
    ["training loss", plain(state.loss), state.unigram_perplexity ? `unigrams: ${plain(Math.log(state.unigram_perplexity))}` : "mean of the workers"],
    ["step", whole(state.step), state.steps ? `of ${whole(state.steps)} · ${share(done)}` : "", ""],
    [state.seconds_left && state.status === "training" ? "time left" : "time", duration(state.status === "training" && state.seconds_left ? state.seconds_left : state.seconds), state.status === "training" ? `${duration(state.seconds)} so far` : state.first_time ? date(state.first_time) : ""],
    ["tokens/s", short(state.tokens_per_second), state.run_tokens === null ? `${short(state.tokens)} tokens` : `${short(state.run_tokens)} in means`],
    ["utilisation", share(state.utilization), `${workers} worker${workers === 1 ? "" : "s"}`],
    ["rounds", whole(rounds.merged), rounds.failed || rounds.refused ? `${rounds.failed} failed, ${rounds.refused} refused` : "none failed", rounds.failed ? "bad" : ""],
    sent(state),
  ];
  fill($("figures"), ...figures.map(([label, value, more, kind]) => make("div", { class: "figure" },
    make("div", { class: "label" }, label), make("div", { class: "value" }, value), make("div", { class: `more ${kind ?? ""}` }, more || "\u00a0"))),
  state.steps ? make("progress", { max: 1, value: Math.min(1, done), "aria-label": "progress" }) : null);
}

export function drawCommunication(state) {
  const { communication: one } = state;
  const less = state.mode !== "data-parallel" && one.reduction >= 1;
  say("bytes-note", less ? `${plain(one.reduction, 3)}× less than data-parallel with ${one.workers} workers` : "");
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
    last ? ["last round", [`${last.contributors.length} contributor${last.contributors.length === 1 ? "" : "s"}`, ...rounds.last_statistics].join(", ")] : null,
  ].filter(Boolean)));
}

export function drawNotes(state) {
  say("notes-note", state.notes.length ? "newest first" : "");
  fill($("notes"), ...[...state.notes].reverse().map((note) => make("li", {},
    make("time", { title: clock(note.time) }, duration(sinceStart(state, note.time))), make("span", { class: `dot ${note.kind === "info" ? "" : note.kind}` }), make("span", {}, note.text))));
  if (!state.notes.length) fill($("notes"), make("li", { class: "empty" }, "nothing besides steps and rounds"));
}

export function drawSamples(state) {
  say("samples-note", state.samples.length > 1 ? "newest first" : "");
  fill($("samples"), ...[...state.samples].reverse().map((one) => make("div", { class: "sample" },
    make("div", { class: "quiet" }, one.step ? `step ${whole(one.step)}` : `after ${duration(sinceStart(state, one.time))}`),
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
