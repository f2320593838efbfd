// The server's JSON, and the stream that tells when a run has changed.
async function get(path, values = {}) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null && value !== undefined));
  const response = await fetch(query.size ? `${path}?${query}` : path);
  if (!response.ok) throw new Error((await response.text()).slice(0, 300) || `the server answered ${response.status}`);
  return response.json();
}

const of = (run, what) => `/api/run/${run.split("/").map(encodeURIComponent).join("/")}/${what}`;
export const runs = () => get("/api/runs");
export const state = (run, until) => get(of(run, "state"), { until });
export const series = (run, until, points) => get(of(run, "series"), { until, points });
export const rounds = (run, until, before, count) => get(of(run, "rounds"), { until, before, count });
export const config = (run) => get(of(run, "config"));
export const addresses = (run) => ["state", "series", "rounds", "config"].map((what) => [what, of(run, what)]);

// Calls `changed(run)` for every change; returns a function that ends it.
export function follow(names, changed, connected) {
  const query = new URLSearchParams(names.map((name) => ["run", name]));
  const source = new EventSource(`/api/stream?${query}`);
  source.addEventListener("change", (event) => changed(JSON.parse(event.data).run));
  source.addEventListener("open", () => connected(true));
  source.addEventListener("error", () => connected(false));
  return () => source.close();
}
