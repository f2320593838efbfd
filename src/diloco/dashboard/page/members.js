// A tile for each worker: those of this machine, and in a swarm all members. Many workers get small tiles.
import { $, fill, make, say } from "./dom.js";
import { bytes, duration, missing, plain, share, short, sinceStart, whole } from "./format.js";

const KINDS = { training: "busy", "in a round": "busy", joined: "busy", joining: "warning", done: "good", left: "", lost: "bad", failed: "bad", banned: "bad", excluded: "bad" };
const GONE = new Set(["left", "lost", "banned", "excluded"]);
const MOST = 512;

export function drawMembers(state) {
  const all = merge(state), filter = $("members-filter");
  filter.hidden = all.length <= 24;
  const wanted = filter.value.trim().toLowerCase();
  const found = wanted ? all.filter((one) => `${one.number} ${one.label} ${one.state}`.toLowerCase().includes(wanted)) : all;
  const furthest = Math.max(0, ...all.map((one) => one.step ?? 0)), target = $("members");
  target.classList.toggle("dense", found.length > 24);
  fill(target, ...found.slice(0, MOST).map((one) => tile(one, furthest, state)));
  if (!found.length) fill(target, make("p", { class: "empty" }, all.length ? "no worker matches" : "no worker has started yet"));
  say("members-note", summary(all, found.length) + (state.members_left_out ? `, ${whole(state.members_left_out)} more not listed` : ""));
}

// By number: what the log says of a worker of this machine, and what the swarm says of a member.
function merge(state) {
  const all = new Map();
  for (const one of state.workers) all.set(one.worker, { ...one, number: one.worker, label: one.local ? one.device ?? "" : "" });
  for (const one of state.members) {
    const known = all.get(one.member) ?? { number: one.member, local: false };
    const gone = GONE.has(one.state);
    all.set(one.member, {
      ...known, label: one.label || known.label || "", link: one.link, latency: one.latency_seconds, reason: one.reason, since: one.since,
      joined: one.joined, contributed: one.contributed, state: known.local && !gone ? known.state : one.state, step: Math.max(known.step ?? 0, one.step ?? 0),
      loss: known.loss ?? one.loss, step_seconds: one.step_seconds, tokens: known.tokens ?? one.tokens,
    });
  }
  return [...all.values()].sort((a, b) => a.number - b.number);
}

function summary(all, found) {
  const counts = new Map();
  for (const one of all) counts.set(one.state || "known", (counts.get(one.state || "known") ?? 0) + 1);
  const parts = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
  return found > MOST ? `${parts} · the first ${MOST} are shown` : parts;
}

function tile(one, furthest, state) {
  const lag = furthest - (one.step ?? 0), usual = state.rounds.straggler?.worker === one.number;
  const rows = [
    ["step", whole(one.step) + (lag > 0 && !GONE.has(one.state) ? `  −${whole(lag)}` : "")],
    ["loss", plain(one.loss)],
    ["speed", one.tokens_per_second ? `${short(one.tokens_per_second)} tok/s` : one.step_seconds ? `${plain(1 / one.step_seconds, 3)} steps/s` : missing],
    one.bytes_sent ? ["sent", bytes(one.bytes_sent)] : null,
    one.latency ? ["link", `${Math.round(1000 * one.latency)} ms${one.link ? ", " + one.link : ""}`] : one.link && !one.local ? ["link", one.link] : null,
    one.contributed !== null && one.contributed !== undefined ? ["last round", whole(one.contributed)] : null,
    usual ? ["slowest in", `${state.rounds.straggler.rounds} of ${state.rounds.straggler.of} rounds`] : null,
    one.joined && state.first_time !== null ? ["joined", `after ${duration(sinceStart(state, one.joined))}`] : null,
  ].filter(Boolean);
  const title = `worker ${one.number} ${one.label}: ${one.state}, step ${whole(one.step)}${lag ? `, ${whole(lag)} behind` : ""}${usual ? "; usually the last" : ""}`;
  return make("article", { class: `member${GONE.has(one.state) ? " gone" : ""}${usual ? " late" : ""}`, title, "data-worker": one.number },
    make("div", { class: "who" }, make("span", { class: `dot ${KINDS[String(one.state).split(":")[0]] ?? ""}` }), String(one.number), make("span", { class: "where" }, one.label || (one.local ? "" : "elsewhere")), make("span", { class: "state" }, one.state)),
    make("div", { class: "brief" }, make("span", {}, whole(one.step)), make("span", {}, plain(one.loss, 3))),
    make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    Number.isFinite(one.utilization) && one.utilization !== null ? make("meter", { min: 0, max: 1, low: 0.5, value: one.utilization, title: `utilisation ${share(one.utilization)}` }) : null,
    one.reason || one.error ? make("p", { class: "reason" }, one.reason || one.error) : null);
}
