// A job while it waits and runs.

import { announce, h } from "./dom.js";
import { seconds } from "./format.js";

const STATES = { queued: "Waiting for a worker", running: "Planning", cancelling: "Stopping" };

export class ProgressCard {
  /** `cancel()` is called by the button. */
  constructor(job, { cancel, subject }) {
    this.began = performance.now() - Math.max(0, Date.now() - 1000 * job.created_s);
    this.state = h("span", { class: "badge" });
    this.bar = h("progress", { "aria-label": "Configurations priced" });
    this.message = h("p", {});
    this.amount = h("span", { class: "number soft" });
    this.clock = h("span", { class: "number soft" });
    this.best = h("p", {});
    this.trouble = h("p", { class: "notice", hidden: true }, "The connection broke; trying again. The job goes on.");
    this.button = h("button", {
      type: "button", class: "button", id: "cancel",
      onclick: () => {
        this.button.disabled = true;
        cancel();
      },
    }, "Cancel");
    this.heading = h("h2", { tabindex: "-1" }, subject);
    this.element = h("section", { class: "card running", "aria-label": "Progress" },
      h("div", { class: "row" }, this.heading, this.state),
      this.bar,
      h("div", { class: "row" }, this.message, this.amount),
      this.best,
      this.trouble,
      h("div", { class: "row" }, this.button, this.clock));
    this.spoken = 0;
    this.timer = setInterval(() => this.tick(), 1000);
    this.tick();
    this.seen(job, "job");
  }

  tick() {
    this.clock.textContent = `${Math.max(0, Math.round((performance.now() - this.began) / 1000))} s`;
  }

  /** An event of the job, or the job itself. */
  seen(data, kind) {
    const state = kind === "job" ? data.state : kind === "progress" ? "running" : kind;
    this.state.className = `badge ${state}`;
    this.state.textContent = STATES[state] ?? state;
    const progress = kind === "progress" ? data : kind === "job" ? data.progress : null;
    if (state === "queued") this.message.textContent = "There is no free worker yet; the job keeps its place.";
    else if (!progress) this.message.textContent = state === "cancelling" ? "The worker was asked to stop." : "Reading the model.";
    if (!progress) return;
    if (progress.message) this.message.textContent = progress.message;
    if (progress.total) {
      this.bar.max = progress.total;
      this.bar.value = progress.done ?? 0;
      this.amount.textContent = `${progress.done ?? 0} of ${progress.total}`;
    }
    if (progress.best_step_time_s) {
      this.best.replaceChildren("Best so far: ",
        h("strong", { class: "number" }, seconds(progress.best_step_time_s)),
        progress.best_label ? ` with ${progress.best_label}` : null);
    }
    const now = performance.now();
    if (now - this.spoken > 5000) { // a screen reader is not told each of a hundred steps
      this.spoken = now;
      announce(`${this.message.textContent}${this.best.textContent ? `. ${this.best.textContent}` : ""}`);
    }
  }

  broken(on) {
    this.trouble.hidden = !on;
  }

  close() {
    clearInterval(this.timer);
  }
}
