// Who waits at the stop, by tenant and class: a table in which people stand.

import { el, svg } from "./dom.js";
import { lookOf } from "./tenants.js";
import { classWords, count, durationText, plural, tenantWords } from "./words.js";

const MAX_PEOPLE = 12;
const BODY = "M6 0a4 4 0 1 1 0 8a4 4 0 0 1 0-8zM1 13a4 4 0 0 1 4-4h2a4 4 0 0 1 4 4v6h-2v5H3v-5H1z";

export class Stop {
  constructor(node) {
    this.node = node;
    this.shown = null;
  }

  show(queues, manyModels) {
    const key = JSON.stringify([queues, manyModels]);
    if (key === this.shown) return;
    this.shown = key;
    this.node.replaceChildren(queues.length === 0 ? nobody() : this.table(queues, manyModels));
  }

  table(queues, manyModels) {
    const names = ["Tenant", "Class", ...(manyModels ? ["Model"] : []), "Waiting", "Tokens", "Longest wait"];
    const numbers = new Set(["Tokens", "Longest wait"]);
    const head = names.map((name) => el("th", { scope: "col", class: numbers.has(name) ? "number" : null }, name));
    const rows = queues.map((queue) => row(queue, manyModels));
    const caption = el("caption", { class: "hidden" }, "Requests that wait, by tenant and class");
    return el("table", {}, caption, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  }
}

function row(queue, manyModels) {
  const look = lookOf(queue.tenant ?? "");
  const number = queue.numRequests ?? 0;
  const chip = el("span", { class: "chip", "data-colour": look.colour, "aria-hidden": "true" }, look.initials);
  const people = el("span", { class: "people" }, el("b", {}, count(number)), crowd(Math.min(number, MAX_PEOPLE), look));
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, el("span", { class: "who" }, chip, tenantWords(queue.tenant))),
    el("td", {}, classWords(queue.priority)),
    ...(manyModels ? [el("td", {}, queue.model ?? "")] : []),
    el("td", { class: "people-cell" }, people),
    el("td", { class: "number", "data-name": "tokens" }, count(Number(queue.numTokens ?? 0))),
    el("td", { class: "number", "data-name": "longest wait" }, durationText(Number(queue.longestWaitMs ?? 0))),
  );
}

function crowd(number, look) {
  const people = Array.from({ length: number }, (_, at) =>
    svg("path", { d: BODY, class: "person", "data-colour": look.colour, transform: `translate(${at * 14} 0)` }),
  );
  return svg("svg", { viewBox: `0 0 ${number * 14} 24`, width: number * 14, height: 24, "aria-hidden": "true" }, ...people);
}

function nobody() {
  const sign = svg(
    "svg",
    { viewBox: "0 0 32 40", "aria-hidden": "true" },
    svg("path", { d: "M16 16V39M10 39H22", class: "sign-post" }),
    svg("rect", { x: 5, y: 2, width: 22, height: 15, rx: 4, class: "sign-plate" }),
  );
  return el("p", { class: "sign" }, sign, "Nobody waits.");
}

export function waitingWords(queues) {
  return plural(queues.reduce((all, one) => all + (one.numRequests ?? 0), 0), "request");
}
