// A tile for each worker: those of this machine, and in a swarm all members. Many workers get small tiles.
import { $, fill, make, say } from "./dom.js";
import { bytes, duration, missing, plain, share, short, sinceStart, whole } from "./format.js";

const DOTS = {
  training: "busy", "in a round": "busy", joined: "busy", joining: "warning", done: "good", left: "", lost: "bad",
  failed: "bad", banned: "bad", excluded: "bad",
};
const GONE = new Set(["left", "lost", "banned", "excluded"]);
const FEW = 24;
const MOST = 512;

export function drawMembers(state) {
  const all = merge(state);
  const filter = $("members-filter");
  filter.hidden = all.length <= FEW;
  const wanted = filter.value.trim().toLowerCase();
  const matching = all.filter((worker) => `${worker.number} ${worker.label} ${worker.state}`.toLowerCase().includes(wanted));
  const furthest = Math.max(0, ...all.map((worker) => worker.step ?? 0));
  const target = $("members");
  target.classList.toggle("dense", matching.length > FEW);
  fill(target, ...matching.slice(0, MOST).map((worker) => tile(worker, furthest, state)));
  if (!matching.length) fill(target, make("p", { class: "empty" }, all.length ? "no worker matches" : "no worker has started yet"));
  const leftOut = state.members_left_out ? `, ${whole(state.members_left_out)} more not listed` : "";
  say("members-note", summary(all, matching.length) + leftOut);
}

// By number: what the log says of a worker of this machine, and what the swarm says of a member.
function merge(state) {
  const workers = new Map();
  for (const worker of state.workers) {
    workers.set(worker.worker, { ...worker, number: worker.worker, label: worker.local ? worker.device ?? "" : "" });
  }
  for (const member of state.members) {
    const worker = workers.get(member.member) ?? { number: member.member, local: false };
    const knownHere = worker.local && !GONE.has(member.state);
    workers.set(member.member, {
      ...worker,
      label: member.label || worker.label || "",
      state: knownHere ? worker.state : member.state,
      step: Math.max(worker.step ?? 0, member.step ?? 0),
      loss: worker.loss ?? member.loss,
      tokens: worker.tokens ?? member.tokens,
      step_seconds: member.step_seconds,
      contributed: member.contributed,
      link: member.link,
      latency: member.latency_seconds,
      reason: member.reason,
      joined: member.joined,
    });
  }
  return [...workers.values()].sort((a, b) => a.number - b.number);
}

function summary(workers, matching) {
  const counts = new Map();
  for (const worker of workers) {
    const state = worker.state || "known";
    counts.set(state, (counts.get(state) ?? 0) + 1);
  }
  const text = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
  return matching > MOST ? `${text} · the first ${MOST} are shown` : text;
}

function tile(worker, furthest, state) {
  const gone = GONE.has(worker.state);
  const lag = furthest - (worker.step ?? 0);
  const usuallyLast = state.rounds.straggler?.worker === worker.number;
  const title = `worker ${worker.number} ${worker.label}: ${worker.state}, step ${whole(worker.step)}`
    + (lag ? `, ${whole(lag)} behind` : "") + (usuallyLast ? "; usually the last" : "");
  const facts = tileFacts(worker, lag, state).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  const used = worker.utilization;
  const problem = worker.reason || worker.error;
  return make("article", { class: `member${gone ? " gone" : ""}${usuallyLast ? " late" : ""}`, title, "data-worker": worker.number },
    make("div", { class: "who" },
      make("span", { class: `dot ${DOTS[String(worker.state).split(":")[0]] ?? ""}` }),
      String(worker.number),
      make("span", { class: "where" }, worker.label || (worker.local ? "" : "elsewhere")),
      make("span", { class: "state" }, worker.state)),
    make("div", { class: "brief" }, make("span", {}, whole(worker.step)), make("span", {}, plain(worker.loss, 3))),
    make("dl", {}, ...facts),
    Number.isFinite(used) ? make("meter", { min: 0, max: 1, low: 0.5, value: used, title: `utilisation ${share(used)}` }) : null,
    problem ? make("p", { class: "reason" }, problem) : null);
}

function tileFacts(worker, lag, state) {
  const { straggler } = state.rounds;
  const behind = lag > 0 && !GONE.has(worker.state) ? `  −${whole(lag)}` : "";
  const facts = [["step", whole(worker.step) + behind], ["loss", plain(worker.loss)], ["speed", speed(worker)]];
  if (worker.bytes_sent) facts.push(["sent", bytes(worker.bytes_sent)]);
  if (worker.latency) facts.push(["link", `${Math.round(1000 * worker.latency)} ms${worker.link ? ", " + worker.link : ""}`]);
  else if (worker.link && !worker.local) facts.push(["link", worker.link]);
  if (worker.contributed !== null && worker.contributed !== undefined) facts.push(["last round", whole(worker.contributed)]);
  if (straggler?.worker === worker.number) facts.push(["slowest in", `${straggler.rounds} of ${straggler.of} rounds`]);
  if (worker.joined && state.first_time !== null) facts.push(["joined", `after ${duration(sinceStart(state, worker.joined))}`]);
  return facts;
}

function speed(worker) {
  if (worker.tokens_per_second) return `${short(worker.tokens_per_second)} tok/s`;
  return worker.step_seconds ? `${plain(1 / worker.step_seconds, 3)} steps/s` : missing;
}
