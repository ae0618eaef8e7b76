// Two tables: what waits in the queue, and what tenants use.

import { el, svg } from "./dom.js";
import { lookOf } from "./tenants.js";
import { classWords, count, durationText, figure, tenantWords } from "./words.js";

export class Queue {
  constructor(node) {
    this.node = node;
    this.shown = null;
  }

  show(queues, manyModels) {
    const key = JSON.stringify([queues, manyModels]);
    if (key === this.shown) return;
    this.shown = key;
    if (queues.length === 0) {
      this.node.replaceChildren(el("p", { class: "empty" }, "The queue is empty."));
      return;
    }
    const most = Math.max(...queues.map((one) => one.numRequests ?? 0));
    const rows = queues.map((one) => {
      const under = [classWords(one.priority), ...(manyModels ? [one.model ?? ""] : [])].join(" · ");
      const number = one.numRequests ?? 0;
      return [who(one.tenant, under), el("span", { class: "amount" }, el("b", {}, count(number)), meter(number / Math.max(most, 1))), count(Number(one.numTokens ?? 0)), durationText(Number(one.longestWaitMs ?? 0))];
    });
    this.node.replaceChildren(table("Requests in the queue, by tenant and class", ["Tenant", "Waiting", "Tokens", "Longest wait"], rows));
  }
}

// Tenants drawn apart; the others are a band together.
const MAX_BANDS = 8;

export class Usage {
  constructor(node) {
    this.shown = null;
    this.bands = svg("g");
    this.top = el("span");
    const picture = svg("svg", { viewBox: "0 0 1000 60", preserveAspectRatio: "none", "aria-hidden": "true" }, this.bands);
    this.picture = el("div", { class: "bands" }, el("p", { class: "zoom" }, "Output tokens/s by tenant, highest ", this.top), picture);
    this.node = el("div");
    node.append(this.node, this.picture);
  }

  // Output by tenant over the time of the charts.
  draw(history, model, now, rangeMs) {
    const names = history.tenants(model, rangeMs).map((one) => one.tenant);
    const rows = history.outputOf(model, names).filter(([atMs]) => atMs > now - rangeMs).map(([atMs, rates]) => {
      const rest = rates.slice(MAX_BANDS).reduce((all, one) => all + one, 0);
      return [atMs, names.length > MAX_BANDS ? [...rates.slice(0, MAX_BANDS), rest] : rates];
    });
    const sum = (rates, number) => rates.slice(0, number).reduce((all, one) => all + one, 0);
    const top = Math.max(...rows.map(([, rates]) => sum(rates)), 0);
    this.picture.hidden = !(top > 0);
    this.top.textContent = figure(top);
    const point = (atMs, value) => `${(1000 * (1 - (now - atMs) / rangeMs)).toFixed(1)} ${(60 * (1 - value / (top || 1))).toFixed(1)}`;
    const bands = names.slice(0, MAX_BANDS + 1).map((name, at) => {
      const edge = (number) => rows.map(([atMs, rates]) => point(atMs, sum(rates, number)));
      const colour = at < MAX_BANDS ? lookOf(name).colour : "other";
      return svg("path", { class: "band", "data-colour": colour, d: `M${[...edge(at + 1), ...edge(at).reverse()].join("L")}Z` });
    });
    this.bands.replaceChildren(...bands);
  }

  show(tenants) {
    const rows = tenants.map((one) => [one.tenant, count(one.running), figure(one.outputPerS), figure(one.promptPerS), figure(one.endedPerMin)]);
    const key = JSON.stringify(rows);
    if (key === this.shown) return;
    this.shown = key;
    if (rows.length === 0) {
      this.node.replaceChildren(el("p", { class: "empty" }, "No requests in the last minute."));
      return;
    }
    const cells = rows.map(([tenant, ...figures]) => [who(tenant), ...figures]);
    this.node.replaceChildren(table("Tenants in the last minute, of this router", ["Tenant", "Running", "Output tok/s", "Prompt tok/s", "Ended /min"], cells));
  }
}

export function table(caption, names, rows) {
  const head = names.map((name, at) => el("th", { scope: "col", class: at > 0 ? "number" : null }, name));
  const body = rows.map(([first, ...others]) => el("tr", {}, el("th", { scope: "row" }, first), ...others.map((cell) => el("td", { class: "number" }, cell))));
  return el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
}

export function who(tenant, under = "") {
  const look = lookOf(tenant ?? "");
  const chip = el("span", { class: "chip", "data-colour": look.colour, "aria-hidden": "true" }, look.initials);
  return el("span", { class: "who" }, chip, el("span", {}, tenantWords(tenant), under ? el("small", {}, under) : ""));
}

function meter(share) {
  return svg("svg", { class: "small-meter", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { width: 100, height: 4, class: "meter-track" }), svg("rect", { width: (100 * share).toFixed(1), height: 4, class: "meter-fill" }));
}
