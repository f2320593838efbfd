// Replays a run: the slider chooses a moment, and the page shows the run as it was then.
import { $ } from "./dom.js";
import { clock, duration, sinceStart } from "./format.js";

const REPLAY_SECONDS = 30;
const TICK_MILLISECONDS = 250;

export class Scrubber {
  // `changed(until)`: a moment was chosen; null: now.
  constructor(changed) {
    this.changed = changed;
    this.until = null;
    this.first = null;
    this.last = null;
    this.timer = null;
    $("moment").addEventListener("input", () => {
      const until = this.fromSlider();
      this.stop();
      this.choose(until);
    });
    $("live").addEventListener("click", () => this.live());
    $("play").addEventListener("click", () => this.toggle());
    this.show();
  }

  range(state) {
    this.first = state.first_time;
    this.last = state.last_time;
    this.state = state;
    this.show();
  }

  fromSlider() {
    const part = Number($("moment").value) / 1000;
    return part >= 1 ? null : this.first + part * (this.last - this.first);
  }

  choose(until) {
    this.until = until;
    this.show();
    this.changed(until);
  }

  move(part) {
    if (this.first === null) return;
    this.stop();
    const next = (this.until ?? this.last) + part * (this.last - this.first);
    this.choose(next >= this.last ? null : Math.max(this.first, next));
  }

  live() {
    this.stop();
    this.choose(null);
  }

  toggle() {
    if (this.timer) this.stop();
    else this.play();
  }

  play() {
    if (this.first === null) return;
    if (this.until === null) this.until = this.first;
    this.timer = setInterval(() => {
      const next = this.until + ((this.last - this.first) * TICK_MILLISECONDS) / (1000 * REPLAY_SECONDS);
      if (next >= this.last) this.live();
      else this.choose(next);
    }, TICK_MILLISECONDS);
    this.show();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.show();
  }

  show() {
    const moment = $("moment");
    const length = this.last - this.first;
    moment.disabled = $("play").disabled = this.first === null || length <= 0;
    moment.value = this.until === null || length <= 0 ? 1000 : Math.round((1000 * (this.until - this.first)) / length);
    const at = this.until ?? this.last;
    $("moment-text").textContent = at === null ? "" : `${duration(sinceStart(this.state, at))} · ${clock(at)}`;
    moment.setAttribute("aria-valuetext", $("moment-text").textContent);
    $("play").textContent = this.timer ? "❚❚" : "▶";
    $("live").classList.toggle("on", this.until === null);
  }
}
