// The row of figures at the top: what one wants to know at a glance.

import { el, mark, say, svg } from "./dom.js";
import { count, duration, figure, percent, plural } from "./words.js";

export class Figures {
  constructor(node) {
    this.seats = new Figure("Seats taken", true);
    this.waiting = new Figure("Waiting");
    this.output = new Figure("Output");
    this.first = new Figure("First token");
    this.between = new Figure("Between tokens");
    this.blocks = new Figure("KV blocks promised", true);
    node.append(...[this.seats, this.waiting, this.output, this.first, this.between, this.blocks].map((one) => one.node));
  }

  show({ buses, queues, latencies }) {
    const sum = (values) => values.reduce((all, value) => all + value, 0);
    const [taken, seats] = [sum(buses.map((bus) => bus.capacity.seatsUsed ?? 0)), sum(buses.map((bus) => bus.seats()))];
    this.seats.show(count(taken), `of ${count(seats)}`, "", taken / Math.max(seats, 1));
    const longest = Math.max(0, ...queues.map((one) => Number(one.longestWaitMs ?? 0)));
    const waiting = sum(queues.map((one) => one.numRequests ?? 0));
    this.waiting.show(count(waiting), waiting === 1 ? "request" : "requests", waiting > 0 ? `longest ${duration(longest).join(" ")}` : "nobody waits");
    const ended = sum(latencies.map((one) => one.numEnded ?? 0));
    const refused = sum(latencies.map((one) => one.numRefused ?? 0));
    const minute = `${count(ended)} ended, ${count(refused)} refused / min`;
    this.output.show(figure(sum(latencies.map((one) => one.outputTokensPerS ?? 0))), "tokens/s", minute);
    this.showLatency(this.first, latencies, "ttftP50Ms", "ttftP99Ms");
    this.showLatency(this.between, latencies, "interTokenP50Ms", "interTokenP99Ms");
    const total = sum(buses.map((bus) => bus.blocks.total));
    const promised = sum(buses.map((bus) => Math.max(bus.blocks.reserved, bus.blocks.used)));
    this.blocks.show(percent(promised / Math.max(total, 1)), `of ${count(total)}`, "", promised / Math.max(total, 1));
    return `${count(taken)} of ${plural(seats, "seat")} taken, ${plural(waiting, "request")} waiting`;
  }

  showLatency(shown, latencies, median, high) {
    const worst = (name) => Math.max(...latencies.map((one) => one[name]).filter((value) => value !== undefined));
    const has = latencies.some((one) => one[median] !== undefined);
    const [value, unit] = duration(has ? worst(median) : null);
    shown.show(value, unit, has ? `median · p99 ${duration(worst(high)).join(" ")}` : "none in the last minute");
  }
}

class Figure {
  constructor(name, hasMeter = false) {
    this.value = el("span", { class: "value" });
    this.unit = el("span", { class: "unit" });
    this.also = el("span", { class: "also" });
    this.fill = svg("rect", { width: 0, height: 6, class: "meter-fill" });
    const meter = svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { width: 100, height: 6, class: "meter-track" }), this.fill);
    this.node = el("div", {}, el("dt", {}, name), el("dd", {}, this.value, this.unit, hasMeter ? meter : this.also));
  }

  show(value, unit, also, share = 0) {
    say(this.value, value);
    say(this.unit, unit);
    say(this.also, also);
    mark(this.fill, "width", String(Math.min(100 * share, 100)));
  }
}
