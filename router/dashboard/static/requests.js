// Recent requests as a table, and the timeline of one of them.

import { el, mark, say, svg } from "./dom.js";
import { keyOf } from "./history.js";
import { lookOf } from "./tenants.js";
import { count, durationText, plural, tenantWords } from "./words.js";

const SHOWN = matchMedia("(max-width: 720px)").matches ? 10 : 20;
const ONE_MORE = 50;
const STAGES = { queued: "Queued", placed: "Waiting on executor", prefill: "Prefill", decode: "Decode", preempted: "Preempted" };
const COLUMNS = [
  ["Request", ""], ["Tenant", ""], ["Class", "wide"], ["State", ""], ["Executor", "wide"], ["Prompt", "number wide"], ["Output", "number"],
  ["TTFT", "number"], ["Total", "number"], ["Stages", "wide stages"],
];

export const stageWords = (stage) => STAGES[stage] ?? stage;

// Whether it is over here, and how: its finish reason, an error's, or "left" where another router goes on with it.
const outcomeWords = (one) => (one.outcome === "left" ? "on another router" : one.outcome.replaceAll("_", " "));
const stateWords = (one) => (one.outcome ? outcomeWords(one) : stageWords(one.stages.at(-1)?.stage));
const stateKind = (one) => (!one.outcome ? one.stages.at(-1)?.stage : one.isError ? "error" : "ended");

function ttftOf(one) {
  const first = one.stages.find((stage) => stage.stage === "decode");
  return first && one.stages[0]?.stage === "queued" ? first.atMs : null;
}

const lengthOf = (one, now) => one.durationMs ?? now - one.arrivedMs;

// Stages as [stage, begin, end], milliseconds from arrival.
function spansOf(one, now) {
  const end = lengthOf(one, now);
  return one.stages.map((stage, at) => [stage, stage.atMs, Math.max(one.stages[at + 1]?.atMs ?? end, stage.atMs)]);
}

function bar(one, now, height) {
  const whole = Math.max(lengthOf(one, now), 0.001);
  const rects = spansOf(one, now).map(([stage, from, to]) =>
    svg("rect", { class: "stage", "data-stage": stage.stage, x: ((1000 * from) / whole).toFixed(1), width: Math.max((1000 * (to - from)) / whole, 2).toFixed(1), y: 0, height }),
  );
  return svg("svg", { class: "stages-bar", viewBox: `0 0 1000 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...rects);
}

export class RequestList {
  // `onOpen` is called with a request that the reader wants to see.
  constructor(nodes, onOpen) {
    Object.assign(this, nodes);
    this.onOpen = onOpen;
    this.most = SHOWN;
    this.shown = "";
    const head = COLUMNS.map(([name, kind]) => el("th", { scope: "col", class: kind || null }, name));
    this.rows = el("tbody");
    const caption = el("caption", { class: "hidden" }, "Recent requests of this router");
    this.table.append(caption, el("thead", {}, el("tr", {}, ...head)), this.rows);
    this.filter.addEventListener("input", () => this.again());
    this.state.addEventListener("change", () => this.again());
    this.more.addEventListener("click", () => {
      this.most += ONE_MORE;
      this.again();
    });
  }

  again() {
    if (this.last) this.show(...this.last);
  }

  show(history, model, now) {
    this.last = [history, model, now];
    const found = this.found(history, model);
    const seen = found.slice(0, this.most);
    this.more.hidden = found.length <= seen.length;
    say(this.more, `Show ${Math.min(ONE_MORE, found.length - seen.length)} more`);
    this.empty.hidden = found.length > 0;
    this.table.hidden = found.length === 0;
    const key = seen.map((one) => `${keyOf(one)}:${one.revision}`).join("\n");
    // Rows of live requests grow by time: once a second.
    const isSame = key === this.shown && (now - this.drawnMs < 1000 || seen.every((one) => one.outcome));
    if (isSame || this.rows.contains(document.activeElement) && key === this.shown) return;
    this.shown = key;
    this.drawnMs = now;
    this.draw(seen, now);
  }

  found(history, model) {
    const text = this.filter.value.trim().toLowerCase();
    const state = this.state.value;
    return [...history.requests.values()].reverse().filter((one) => {
      if (model && one.model !== model) return false;
      if (state === "live" ? one.outcome : state === "ended" ? !one.outcome : state === "problem" ? !isProblem(one) : false) return false;
      return !text || `${one.id} ${one.tenant} ${one.stages.map((stage) => stage.executor ?? "").join(" ")}`.toLowerCase().includes(text);
    });
  }

  draw(seen, now) {
    const focused = document.activeElement?.dataset?.key;
    this.rows.replaceChildren(...seen.map((one) => this.row(one, now)));
    if (focused) [...this.rows.querySelectorAll("button")].find((one) => one.dataset.key === focused)?.focus();
  }

  row(one, now) {
    const open = el("button", { type: "button", class: "link", "data-key": keyOf(one), title: one.id }, one.id);
    open.addEventListener("click", () => this.onOpen(one));
    const look = lookOf(one.tenant);
    const chip = el("span", { class: "chip", "data-colour": look.colour, "aria-hidden": "true" }, look.initials);
    const ttft = ttftOf(one);
    const cells = [
      el("span", { class: "who" }, chip, el("span", {}, tenantWords(one.tenant))), one.class,
      el("span", { class: "state", "data-kind": stateKind(one) }, stateWords(one)), one.stages.findLast((stage) => stage.executor)?.executor ?? "–",
      count(one.promptTokens), count(one.outputTokens), ttft === null ? "–" : durationText(ttft), durationText(lengthOf(one, now)), bar(one, now, 10),
    ];
    return el("tr", {}, el("th", { scope: "row" }, open), ...cells.map((cell, at) => el("td", { class: COLUMNS[at + 1][1] || null }, cell)));
  }
}

// Moved, preempted, or ended with an error.
const isProblem = (one) => one.isError || one.stages.some((stage) => stage.why || stage.stage === "preempted");

// The timeline of one request, in a dialog.
export class TimelineDialog {
  constructor(node) {
    this.node = node;
    this.title = node.querySelector("h2");
    this.facts = node.querySelector("dl");
    this.picture = node.querySelector(".timeline-bar");
    this.stages = node.querySelector("tbody");
    this.note = node.querySelector(".note");
    node.querySelector("button").addEventListener("click", () => node.close());
    node.addEventListener("click", (event) => event.target === node && node.close());
    node.addEventListener("close", () => {
      this.key = null;
    });
  }

  get isOpen() {
    return this.node.open;
  }

  open(key) {
    this.key = key;
    this.drawn = null;
    this.stages.replaceChildren();
    this.picture.replaceChildren();
    this.facts.replaceChildren();
    say(this.title, "Request");
    say(this.note, "loading");
    if (!this.node.open) this.node.showModal();
  }

  fail(why) {
    say(this.note, why);
  }

  // `live`: what an executor says of it now, where it is on a seat.
  show(one, now, live) {
    say(this.title, one.id);
    const ttft = ttftOf(one);
    const facts = [
      ["Tenant", tenantWords(one.tenant)], ["Class", one.class], ["Model", one.model], ["State", stateWords(one)],
      ["Prompt", `${plural(one.promptTokens, "token")}, ${count(one.cachedTokens)} from cache`], ["Output", plural(Math.max(live?.output ?? 0, one.outputTokens), "token")],
      ["TTFT", ttft === null ? "–" : durationText(ttft)], [one.outcome ? "Total" : "So far", durationText(lengthOf(one, now))],
    ];
    this.facts.replaceChildren(...facts.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
    this.picture.replaceChildren(bar(one, now, 24));
    const rows = spansOf(one, now).map(([stage, from, to]) => [stage.stage, stageWords(stage.stage), `+${durationText(from)}`, durationText(to - from), stage.executor ?? "", stage.why ? `moved: ${stage.why.replaceAll("_", " ")}` : ""]);
    if (one.outcome) rows.push(["end", `Ended: ${outcomeWords(one)}`, `+${durationText(one.durationMs)}`, "", "", ""]);
    this.stages.replaceChildren(...rows.map((cells) => el("tr", {}, el("th", { scope: "row" }, el("i", { class: "stage-mark", "data-stage": cells[0], "aria-hidden": "true" }), cells[1]), ...cells.slice(2).map((text, at) => el("td", { class: at < 2 ? "number" : null }, text)))));
    const notes = [one.numLeftOut ? `${plural(one.numLeftOut, "stage")} in the middle omitted` : "", one.numResumed ? `resumed ${plural(one.numResumed, "time")}` : ""];
    say(this.note, notes.filter(Boolean).join("; "));
  }
}
