// The list of operational events, newest first.

import { el, say } from "./dom.js";

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const whole = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const SIGNS = { good: "✓", note: "i", warning: "!", error: "×" };
const SHOWN = 60;

export class EventList {
  constructor(node, empty) {
    this.node = node;
    this.empty = empty;
    this.shown = "";
  }

  show(events, model) {
    const seen = [...events.values()].filter((one) => !model || !one.model || one.model === model).reverse().slice(0, SHOWN);
    const key = seen.map((one) => `${one.id}:${one.count}`).join();
    this.empty.hidden = seen.length > 0;
    if (key === this.shown) return;
    this.shown = key;
    this.node.replaceChildren(...seen.map(line));
  }
}

function line(event) {
  const at = new Date(event.atMs);
  const sign = el("span", { class: "event-sign", "data-severity": event.severity, "aria-hidden": "true" }, SIGNS[event.severity] ?? "i");
  const severity = el("span", { class: "hidden" }, `${event.severity}: `);
  const time = el("time", { datetime: at.toISOString(), title: whole.format(at) });
  say(time, clock.format(at));
  return el("li", {}, sign, time, el("span", { class: "event-text" }, severity, event.text));
}
