// The card of one executor: compact with its figures and seats, in detail also with its steps, blocks and what limits it.

import { BlocksStrip } from "./blocks.js";
import { el, mark, say, svg, TableView } from "./dom.js";
import { RoadPicture } from "./road.js";
import { SeatsPicture } from "./seats.js";
import { constraintWords, count, durationText, figure, percent, phaseWords, plural, tenantWords } from "./words.js";

const MAX_ROWS = 200;
const SEQUENCE_COLUMNS = [
  ["Seat", true], ["Tenant", false], ["Phase", false], ["Prompt tokens", true], ["Output tokens", true], ["Blocks", true],
  ["Request", false],
];
const HINT = "Select a seat by pointer, touch or arrow keys. Click it or press Enter for the request's timeline.";
const HOST_PARTS = [["schedule", ["inbox", "plan"]], ["launch", ["launch"]], ["retire", ["retire", "publish"]]];
let numCards = 0;

export class BusCard {
  constructor(bus) {
    const name = bus.name;
    this.title = el("h3", {}, name);
    this.state = el("span", { class: "tag" });
    this.batching = el("span", { class: "tag", "data-kind": "plain" });
    this.model = el("span", { class: "model" });
    this.pace = paceList(["seats", "KV", "tok/s", "step"]);
    this.meter = new PoolMeter();
    this.trend = svg("path", { class: "trend-line" });
    this.trendNode = el("div", { class: "trend", title: "Seats in use, over the range of the charts" }, svg("svg", { viewBox: "0 0 1000 24", preserveAspectRatio: "none", "aria-hidden": "true" }, this.trend));
    this.button = el("button", { type: "button", class: "small", "aria-expanded": "false", "aria-controls": `details-${numCards}` }, "Details");
    this.details = el("div", { class: "details", id: `details-${numCards++}` });
    this.isOpen = false;
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.seats = el("div", { class: "seats", tabindex: "0", role: "slider", "aria-label": `Seats of ${name}`, "aria-valuemin": "1" }, this.canvas);
    this.lookedAt = el("p", { class: "looked-at" }, HINT);
    this.roadCanvas = el("canvas", { role: "img" });
    this.passing = el("span");
    this.blocks = new BlocksStrip(name);
    this.bounds = el("ul", { class: "bounds" });
    this.host = el("dl", { class: "pace" });
    this.sequences = new TableView(`Sequences of ${name}`, SEQUENCE_COLUMNS, "Sequences");
    this.steps = new TableView(`Newest steps of ${name}`, [
      ["Step", true], ["Duration", true], ["Output tokens", true], ["Prompt tokens", true], ["Started", true], ["Ended", true], ["Bound by", false],
    ], "Steps");
    this.node = el("article", { class: "card bus", "aria-label": `Executor ${name}` }, ...this.parts());
    this.picture = new SeatsPicture(this.canvas);
    this.road = new RoadPicture(this.roadCanvas);
    this.isVisible = true;
    this.open(false);
    this.listen();
  }

  parts() {
    this.details.append(
      el("div", { class: "road" }, el("div", { class: "part-heading" }, el("h4", {}, "Tokens in each step", ...roadKey()), this.passing), this.roadCanvas),
      this.blocks.node,
      el("div", {}, el("h4", {}, "Step time, mean of the last 10 s"), this.host),
      el("div", {}, el("h4", {}, "What bound the steps, last 10 s"), this.bounds),
      el("div", { class: "tables" }, this.sequences.node, this.steps.node, this.blocks.table.node),
    );
    return [
      el("div", { class: "bus-top" }, this.title, this.state, this.batching, this.model, this.trendNode, this.button),
      el("div", { class: "pace-row" }, this.pace.node, this.meter.node),
      el("div", { class: "seats-part" }, this.seats, this.lookedAt),
      this.details,
    ];
  }

  open(isOpen) {
    this.isOpen = isOpen;
    mark(this.node, "data-open", String(isOpen));
    mark(this.button, "aria-expanded", String(isOpen));
    this.details.hidden = !isOpen;
    this.picture.isCompact = !isOpen;
    if (this.bus) this.showDetails(this.bus);
    this.onChange?.();
  }

  listen() {
    const point = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return this.picture.seatAt(event.clientX - box.left, event.clientY - box.top);
    };
    this.button.addEventListener("click", () => {
      this.open(!this.isOpen);
      this.onToggle?.(this.isOpen);
    });
    this.seats.addEventListener("click", (event) => {
      // A finger has no hover: its first tap on a seat says who is there, the second opens the timeline.
      if (event.pointerType !== "touch" || this.tapped === this.picture.selected) this.openRequest(point(event));
      this.tapped = this.picture.selected;
    });
    this.seats.addEventListener("pointermove", (event) => this.select(point(event)));
    this.seats.addEventListener("pointerdown", (event) => this.select(point(event)));
    this.seats.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && document.activeElement !== this.seats) this.select(null);
    });
    this.seats.addEventListener("keydown", (event) => this.onKey(event));
    this.seats.addEventListener("focus", () => this.select(this.picture.selected ?? 0));
    this.seats.addEventListener("blur", () => this.select(null));
  }

  // Arrows go over the picture as it is seen: seats are numbered down the columns.
  onKey(event) {
    const { rows } = this.picture.layout ?? { rows: 1 };
    const moves = { ArrowRight: rows, ArrowLeft: -rows, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.select(null);
    if (event.key !== "Enter" && !(event.key in moves)) return;
    // Or the key would press the button that the dialog gives the focus to.
    event.preventDefault();
    if (event.key === "Enter") {
      this.openRequest(this.picture.selected);
      return;
    }
    this.select(Math.min(Math.max((this.picture.selected ?? 0) + moves[event.key], 0), this.bus.seats() - 1));
  }

  // The request on a seat, where the reader may know which it is.
  openRequest(seat) {
    const rider = seat === null ? undefined : this.bus.seated().find((one) => one.seat === seat);
    if (rider?.id) this.onOpen?.({ model: this.bus.model, tenant: rider.tenant, id: rider.id });
  }

  select(seat) {
    this.picture.selected = seat;
    this.tellSelected();
    this.onChange?.();
  }

  tellSelected() {
    const seat = this.picture.selected;
    const rider = seat === null ? null : this.bus.seated().find((one) => one.seat === seat);
    const words = seat === null ? HINT : `Seat ${seat + 1}: ${rider ? riderWords(rider) : "free"}`;
    say(this.lookedAt, words);
    mark(this.lookedAt, "data-selected", String(seat !== null));
    mark(this.seats, "aria-valuenow", String((seat ?? 0) + 1));
    mark(this.seats, "aria-valuetext", seat === null ? this.summary : words);
  }

  show(bus, animate, now) {
    this.bus = bus;
    const { capacity } = bus;
    const isAccepting = capacity.accepting === true;
    say(this.state, isAccepting ? "accepting" : "not accepting");
    mark(this.state, "data-kind", isAccepting ? "on" : "off");
    const isStatic = capacity.batching === "BATCHING_MODE_STATIC";
    say(this.batching, isStatic ? "static batching" : "");
    this.batching.hidden = !isStatic;
    say(this.model, bus.model);
    const taken = capacity.seatsUsed ?? 0;
    const { used, ahead, total } = bus.blocks;
    this.pace.say([
      `${count(taken)} / ${count(bus.seats())}`, percent(used / Math.max(total, 1)), figure(capacity.outputTokensPerS ?? 0), durationText(capacity.stepMs ?? 0),
    ]);
    this.meter.show(used / Math.max(total, 1), ahead / Math.max(total, 1));
    this.summary = summaryOf(bus);
    mark(this.seats, "aria-valuemax", String(Math.max(bus.seats(), 1)));
    this.picture.blockSize = capacity.blockSize;
    this.picture.show(bus, animate, now);
    this.road.add(bus.fresh, animate, now);
    bus.fresh = [];
    this.tellSelected();
    this.showDetails(bus);
  }

  // Seats taken: `rows` are [time, seats or null].
  showTrend(rows, now, rangeMs) {
    const seats = Math.max(this.bus.seats(), 1);
    let path = "";
    let isOn = false;
    for (const [atMs, value] of rows) {
      if (atMs < now - rangeMs) continue;
      if (value !== null) path += `${isOn ? "L" : "M"}${(1000 * (1 - (now - atMs) / rangeMs)).toFixed(1)} ${(23 - (22 * Math.min(value, seats)) / seats).toFixed(1)}`;
      isOn = value !== null;
    }
    mark(this.trend, "d", path || "M0 0");
  }

  showDetails(bus) {
    if (!this.isOpen) return;
    this.blocks.show(bus);
    this.showSteps(bus);
    this.showHost(bus);
    this.sequences.show(() => sequenceRows(bus));
  }

  // Means of a step: the device, the host that it waited for, and what the host's parts took; these may overlap the device.
  showHost(bus) {
    const steps = bus.steps;
    const mean = (valueOf) => steps.reduce((all, step) => all + valueOf(step), 0) / Math.max(steps.length, 1);
    // An engine that does not time its parts, such as vLLM, does not tell either what of a step is the device's.
    const areTimed = steps.some((step) => step.parts.size > 0);
    const isMeasured = areTimed && steps.some((step) => step.device > 0 || step.exposed > 0);
    const rows = [
      ...(isMeasured ? [["device", mean((step) => step.device)], ["exposed host", mean((step) => step.exposed)]] : []),
      ...(areTimed ? HOST_PARTS.map(([name, parts]) => [name, mean((step) => parts.reduce((all, part) => all + (step.parts.get(part) ?? 0), 0))]) : []),
    ];
    const unknown = areTimed ? [] : [["device and host", "unknown"]];
    const { drafts } = bus.capacity;
    const drafted = drafts ? [["drafts accepted", `${count(Number(drafts.numAccepted ?? 0))} of ${count(Number(drafts.numVerified ?? 0))}`]] : [];
    const { states } = bus.capacity;
    const kept = states ? [
      ["state checkpoints", `${count(states.keptCheckpoints ?? 0)} of ${count(states.numCheckpoints ?? 0)}`],
      ["prefix tokens usable", `${count(Number(states.usableTokens ?? 0))} of ${count(Number(states.kvTokens ?? 0))} with KV`],
    ] : [];
    const timed = steps.length > 0 ? [...rows.map(([name, ms]) => [name, durationText(ms)]), ...unknown] : [["no steps", ""]];
    const words = [["steps/s", figure(bus.stepsPerSecond())], ...timed, ...drafted, ...kept];
    while (this.host.children.length > words.length) this.host.lastChild.remove();
    words.forEach(([name, text], at) => {
      const line = this.host.children[at] ?? this.host.appendChild(el("div", {}, el("dt"), el("dd")));
      say(line.children[0], name);
      say(line.children[1], text);
    });
  }

  showSteps(bus) {
    const sum = (name) => bus.steps.reduce((all, step) => all + step[name], 0);
    const words = `${count(sum("boarded"))} started, ${count(sum("left"))} ended in 10 s`;
    say(this.passing, words);
    mark(this.roadCanvas, "aria-label", `Tokens in each step of ${bus.name}. In 10 seconds: ${plural(bus.steps.length, "step")}, ${plural(sum("output"), "output token")}, ${plural(sum("prompt"), "prompt token")}, ${words}`);
    const bounds = bus.bounds();
    const rows = bounds.length > 0 ? bounds : [[bus.capacity.constraint, null]];
    const lines = rows.map(([name, share]) => [share === null ? "" : percent(share), share === null ? "no steps" : constraintWords(name)]);
    while (this.bounds.children.length > lines.length) this.bounds.lastChild.remove();
    lines.forEach(([share, text], at) => {
      const line = this.bounds.children[at] ?? this.bounds.appendChild(el("li", {}, el("span", { class: "share" }), el("span")));
      say(line.children[0], share);
      say(line.children[1], text);
    });
    this.steps.show(() => bus.steps.slice(-50).reverse().map((step) => [
      step.number, durationText(step.ms), step.output, step.prompt, step.boarded, step.left, constraintWords(step.constraint),
    ]));
  }

  isMoving(now) {
    return this.isVisible && (this.picture.isMoving(now) || (this.isOpen && this.road.isMoving()));
  }

  draw(now) {
    if (!this.isVisible) return;
    this.picture.draw(now);
    if (this.isOpen) this.road.draw(now);
  }

  repaint() {
    this.blocks.repaint();
    if (this.bus) this.showDetails(this.bus);
  }
}

// How much of the pool is used, and reserved beyond that.
class PoolMeter {
  constructor() {
    this.used = svg("rect", { height: 8, class: "pool-used" });
    this.ahead = svg("rect", { height: 8, class: "pool-reserved" });
    this.node = svg("svg", { class: "pool-meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { width: 100, height: 8, class: "pool-free" }), this.ahead, this.used);
  }

  show(used, ahead) {
    const width = used > 0 ? Math.max(100 * used, 2) : 0;
    mark(this.used, "width", width.toFixed(2));
    mark(this.ahead, "x", width.toFixed(2));
    mark(this.ahead, "width", (ahead > 0 ? Math.max(Math.min(100 * ahead, 100 - width), 0.5) : 0).toFixed(2));
  }
}

// What the bars of the steps are made of.
function roadKey() {
  return ["output", "prompt"].flatMap((name) => [el("i", { class: `mark ${name}`, "aria-hidden": "true" }), name]);
}

function paceList(names) {
  const values = names.map(() => el("dd"));
  const node = el("dl", { class: "pace" }, ...names.map((name, at) => el("div", {}, el("dt", {}, name), values[at])));
  return { node, say: (texts) => texts.forEach((text, at) => say(values[at], text)) };
}

function riderWords(one) {
  const whose = [tenantWords(one.tenant), phaseWords(one.phase)];
  const tokens = one.phase === "SEQUENCE_PHASE_PREFILL"
    ? `${count(Math.min(one.computed, one.prompt))} of ${plural(one.prompt, "prompt token")} computed`
    : `${plural(one.prompt, "prompt token")}, ${plural(one.output, "output token")}`;
  const blocks = `${count(one.blocks)} of ${plural(one.reserved, "reserved block")} in use`;
  return [...whose, tokens, blocks, one.id ? `request ${one.id}` : "another tenant's request"].join(" · ");
}

function summaryOf(bus) {
  const seated = bus.seated();
  const reading = seated.filter((one) => one.phase === "SEQUENCE_PHASE_PREFILL").length;
  const standing = bus.standing().length;
  return `${seated.length} of ${plural(bus.seats(), "seat")} taken, ${reading} in prefill, ${standing} waiting for a seat`;
}

function sequenceRows(bus) {
  const rows = bus.sequences.slice(0, MAX_ROWS).map((one) => [
    one.seat === null ? "none" : one.seat + 1, tenantWords(one.tenant), phaseWords(one.phase), count(one.prompt), count(one.output),
    `${count(one.blocks)} of ${count(one.reserved)}`, one.id || "–",
  ]);
  const more = bus.sequences.length - rows.length;
  return more > 0 ? [...rows, [`${count(more)} more`, "", "", "", "", "", ""]] : rows;
}
