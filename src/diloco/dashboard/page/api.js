// The server's JSON, and the stream that says when a run has changed.
async function get(path, values = {}) {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(given);
  const response = await fetch(query.size ? `${path}?${query}` : path);
  if (!response.ok) throw new Error((await response.text()).slice(0, 300) || `the server answered ${response.status}`);
  return response.json();
}

const address = (run, what) => `/api/run/${run.split("/").map(encodeURIComponent).join("/")}/${what}`;
export const runs = () => get("/api/runs");
export const state = (run, until) => get(address(run, "state"), { until });
export const series = (run, until, points) => get(address(run, "series"), { until, points });
export const rounds = (run, until, before, count) => get(address(run, "rounds"), { until, before, count });
export const config = (run) => get(address(run, "config"));
export const addresses = (run) => ["state", "series", "rounds", "config"].map((what) => [what, address(run, what)]);

// Calls `onChange(run)` at every change of these runs, and `onConnection(connected)`; returns a function that ends it.
export function follow(names, onChange, onConnection) {
  const query = new URLSearchParams(names.map((name) => ["run", name]));
  const source = new EventSource(`/api/stream?${query}`);
  source.addEventListener("change", (event) => onChange(JSON.parse(event.data).run));
  source.addEventListener("open", () => onConnection(true));
  source.addEventListener("error", () => onConnection(false));
  return () => source.close();
}
