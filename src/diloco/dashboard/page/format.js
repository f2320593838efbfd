// Numbers as people read them.
export const missing = "–";

export function plain(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return missing;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export function whole(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString("en-US") : missing;
}

// 1234567 -> 1.23 M
export function short(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return missing;
  const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [size, letter] of steps) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${letter}${unit}`;
  }
  return `${Number(value.toPrecision(3))}${unit ? " " + unit : ""}`;
}

export const bytes = (value) => short(value, "B");

export function share(value) {
  if (!Number.isFinite(value)) return missing;
  const digits = value > 0.995 && value < 0.9995 ? 1 : 0; // 99.9 % is not 100 %
  return `${(100 * value).toFixed(digits)} %`;
}

export function bits(bytesPerSecond) {
  if (bytesPerSecond === null || !Number.isFinite(bytesPerSecond)) return missing;
  return short(8 * bytesPerSecond, "bit/s");
}

// 3725 -> 1:02:05
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return missing;
  if (seconds < 60) return `${seconds < 10 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
  const total = Math.round(seconds);
  const days = Math.floor(total / 86400);
  const hours = Math.floor((total % 86400) / 3600);
  const minutes = Math.floor((total % 3600) / 60);
  const padded = (number) => String(number).padStart(2, "0");
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours}:${padded(minutes)}:${padded(total % 60)}` : `${minutes}:${padded(total % 60)}`;
}

const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit" };
const DATE = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" };
export const clock = (time) => new Date(1000 * time).toLocaleTimeString([], CLOCK);
export const date = (time) => new Date(1000 * time).toLocaleString([], DATE);

// 3 -> "a moment ago", 75 -> "1 min ago"
export function ago(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return missing;
  if (seconds < 5) return "a moment ago";
  if (seconds < 100) return `${Math.round(seconds)} s ago`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

// Seconds of the run at a time, without the pauses before; `state` has the first time and the pauses.
export function sinceStart(state, time) {
  const paused = state.pauses.reduce((sum, [at, taken]) => sum + (at <= time ? taken : 0), 0);
  return Math.max(0, time - (state.first_time ?? time) - paused);
}
