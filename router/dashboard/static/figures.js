// The row of figures at the top: what one wants to know at a glance.

import { el, mark, say, svg } from "./dom.js";
import { count, duration, figure, percent, plural } from "./words.js";

const MINUTE_MS = 60_000;

export class Figures {
  constructor(node) {
    this.seats = new Figure("Running", true);
    this.waiting = new Figure("Queue");
    this.output = new Figure("Output");
    this.prompt = new Figure("Prompt");
    this.first = new Figure("TTFT");
    this.between = new Figure("Inter-token latency");
    this.blocks = new Figure("KV cache used", true);
    this.hits = new Figure("Prefix cache hits");
    const all = [this.seats, this.waiting, this.output, this.prompt, this.first, this.between, this.blocks, this.hits];
    node.append(...all.map((one) => one.node));
  }

  show({ buses, queues, latencies }, history, model) {
    const sum = (values) => values.reduce((all, value) => all + value, 0);
    const [taken, seats] = [sum(buses.map((bus) => bus.capacity.seatsUsed ?? 0)), sum(buses.map((bus) => bus.seats()))];
    this.seats.show(count(taken), `of ${plural(seats, "seat")}`, plural(buses.length, "executor"), taken / Math.max(seats, 1));
    const longest = Math.max(0, ...queues.map((one) => Number(one.longestWaitMs ?? 0)));
    const waiting = sum(queues.map((one) => one.numRequests ?? 0));
    this.waiting.show(count(waiting), "waiting", waiting > 0 ? `longest ${duration(longest).join(" ")}` : "empty");
    const ended = sum(latencies.map((one) => one.numEnded ?? 0));
    const refused = sum(latencies.map((one) => one.numRefused ?? 0));
    this.output.show(figure(sum(latencies.map((one) => one.outputTokensPerS ?? 0))), "tokens/s", `${count(ended)} ended, ${count(refused)} refused / min`);
    this.showLatency(this.first, latencies, "ttftP50Ms", "ttftP99Ms");
    this.showLatency(this.between, latencies, "interTokenP50Ms", "interTokenP99Ms");
    const total = sum(buses.map((bus) => bus.blocks.total));
    const used = sum(buses.map((bus) => bus.blocks.used));
    const reserved = sum(buses.map((bus) => Math.max(bus.blocks.reserved, bus.blocks.used)));
    this.blocks.show(percent(used / Math.max(total, 1)), `of ${count(total)}`, `${percent(reserved / Math.max(total, 1))} reserved`, used / Math.max(total, 1), reserved / Math.max(total, 1));
    this.showPrompts(history, model);
    return `${count(taken)} of ${plural(seats, "seat")} taken, ${plural(waiting, "request")} waiting`;
  }

  showPrompts(history, model) {
    const [prompt, cached, seconds] = history.lately(model, MINUTE_MS);
    this.prompt.show(seconds > 0 ? figure(prompt / seconds) : "–", seconds > 0 ? "tokens/s" : "", "in the last minute");
    this.hits.show(prompt > 0 ? percent(cached / prompt) : "–", "", prompt > 0 ? "of prompt tokens, last min" : "no prompt in the last minute");
  }

  showLatency(shown, latencies, median, high) {
    const worst = (name) => Math.max(...latencies.map((one) => one[name]).filter((value) => value !== undefined));
    const has = latencies.some((one) => one[median] !== undefined);
    const [value, unit] = duration(has ? worst(median) : null);
    shown.show(value, unit, has ? `p50 · p99 ${duration(worst(high)).join(" ")}` : "none in the last minute");
  }
}

class Figure {
  constructor(name, hasMeter = false) {
    this.value = el("span", { class: "value" });
    this.unit = el("span", { class: "unit" });
    this.also = el("span", { class: "also" });
    this.ahead = svg("rect", { width: 0, height: 4, class: "meter-ahead" });
    this.fill = svg("rect", { width: 0, height: 4, class: "meter-fill" });
    const meter = svg("svg", { viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { width: 100, height: 4, class: "meter-track" }), this.ahead, this.fill);
    this.node = el("div", {}, el("dt", {}, name), el("dd", {}, el("span", { class: "number-line" }, this.value, this.unit), this.also, hasMeter ? meter : ""));
  }

  show(value, unit, also, share = 0, ahead = 0) {
    say(this.value, value);
    say(this.unit, unit);
    say(this.also, also);
    // What is not nothing is seen.
    mark(this.fill, "width", String(share > 0 ? Math.min(Math.max(100 * share, 1), 100) : 0));
    mark(this.ahead, "width", String(ahead > 0 ? Math.min(Math.max(100 * ahead, 1), 100) : 0));
  }
}
