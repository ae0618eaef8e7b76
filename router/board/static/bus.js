// The card of one executor: the bus with its seats, its steps, its blocks, and what bound it.

import { BlocksStrip } from "./blocks.js";
import { el, mark, say, TableView } from "./dom.js";
import { RoadPicture } from "./road.js";
import { SeatsPicture } from "./seats.js";
import { constraintWords, count, durationText, figure, percent, phaseWords, plural, tenantWords } from "./words.js";

const MAX_ROWS = 200;
const SEQUENCE_COLUMNS = [
  ["Seat", true], ["Tenant", false], ["Phase", false], ["Prompt tokens", true], ["Output tokens", true], ["Blocks", true],
  ["Request", false],
];
const HINT = "Point at a seat, tap it, or use the arrow keys to see who sits there.";

export class BusCard {
  constructor(bus) {
    const name = bus.name;
    this.title = el("h3", {}, name);
    this.state = el("span", { class: "tag" });
    this.batching = el("span", { class: "tag", "data-kind": "plain" });
    this.model = el("span", { class: "model" });
    this.pace = paceList(["steps/s", "step", "tokens/s", "seats taken"]);
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.seats = el("div", { class: "seats", tabindex: "0", role: "slider", "aria-label": `Seats of ${name}`, "aria-valuemin": "1" }, this.canvas);
    this.lookedAt = el("p", { class: "looked-at" }, HINT);
    this.roadCanvas = el("canvas", { role: "img" });
    this.passing = el("span");
    this.blocks = new BlocksStrip(name);
    this.bounds = el("ul", { class: "bounds" });
    this.sequences = new TableView(`Sequences of ${name}`, SEQUENCE_COLUMNS, "Sequences");
    this.steps = new TableView(`Newest steps of ${name}`, [
      ["Step", true], ["Took", true], ["Output tokens", true], ["Prompt tokens", true], ["Boarded", true], ["Left", true], ["Bound by", false],
    ], "Steps");
    this.node = el("article", { class: "card bus", "aria-label": `Executor ${name}` }, ...this.parts());
    this.picture = new SeatsPicture(this.canvas);
    this.road = new RoadPicture(this.roadCanvas);
    this.isVisible = true;
    this.listen();
  }

  parts() {
    return [
      el("div", {}, el("div", { class: "bus-top" }, this.title, this.state, this.batching, this.model), this.pace.node),
      el("div", {}, this.seats, this.lookedAt),
      el("div", { class: "road" }, el("div", { class: "part-heading" }, el("h4", {}, "Tokens in each step", ...roadKey()), this.passing), this.roadCanvas),
      this.blocks.node,
      el("div", {}, el("h4", {}, "What kept steps from holding more, last 10 s"), this.bounds),
      el("div", { class: "tables" }, this.sequences.node, this.steps.node, this.blocks.table.node),
    ];
  }

  listen() {
    const point = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return this.picture.seatAt(event.clientX - box.left, event.clientY - box.top);
    };
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
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.select(Math.min(Math.max((this.picture.selected ?? 0) + moves[event.key], 0), this.bus.seats() - 1));
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
    mark(this.seats, "aria-valuenow", String((seat ?? 0) + 1));
    mark(this.seats, "aria-valuetext", seat === null ? this.summary : words);
  }

  show(bus, animate, now) {
    this.bus = bus;
    const { capacity } = bus;
    const isAccepting = capacity.accepting === true;
    say(this.state, isAccepting ? "accepting" : "takes no new work");
    mark(this.state, "data-kind", isAccepting ? "on" : "off");
    say(this.batching, capacity.batching === "BATCHING_MODE_STATIC" ? "static batching" : "in-flight batching");
    say(this.model, bus.model);
    const taken = capacity.seatsUsed ?? 0;
    this.pace.say([
      figure(bus.stepsPerSecond()), durationText(capacity.stepMs ?? 0), figure(capacity.outputTokensPerS ?? 0), `${count(taken)} / ${count(bus.seats())}`,
    ]);
    this.summary = summaryOf(bus);
    mark(this.seats, "aria-valuemax", String(Math.max(bus.seats(), 1)));
    this.picture.blockSize = capacity.blockSize;
    this.picture.show(bus, animate, now);
    this.road.add(bus.fresh, animate, now);
    bus.fresh = [];
    this.blocks.show(bus);
    this.tellSelected();
    this.showSteps(bus);
    this.sequences.show(() => sequenceRows(bus));
  }

  showSteps(bus) {
    const sum = (name) => bus.steps.reduce((all, step) => all + step[name], 0);
    const words = `${plural(sum("boarded"), "boarded", "boarded")}, ${count(sum("left"))} left in 10 s`;
    say(this.passing, words);
    mark(this.roadCanvas, "aria-label", `Tokens in each step of ${bus.name}. In 10 seconds: ${plural(bus.steps.length, "step")}, ${plural(sum("output"), "output token")}, ${plural(sum("prompt"), "prompt token")}, ${words}`);
    const bounds = bus.bounds();
    const rows = bounds.length > 0 ? bounds : [[bus.capacity.constraint, null]];
    const lines = rows.map(([name, share]) => [share === null ? "" : percent(share), share === null ? "no step" : constraintWords(name)]);
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
    return this.isVisible && (this.picture.isMoving(now) || this.road.isMoving());
  }

  draw(now) {
    if (!this.isVisible) return;
    this.picture.draw(now);
    this.road.draw(now);
  }

  repaint() {
    this.blocks.repaint();
    if (this.bus) this.blocks.show(this.bus);
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
  return [...whose, tokens, blocks, one.id ? `request ${one.id}` : "not yours to know which request"].join(" · ");
}

function summaryOf(bus) {
  const seated = bus.seated();
  const reading = seated.filter((one) => one.phase === "SEQUENCE_PHASE_PREFILL").length;
  const standing = bus.standing().length;
  return `${seated.length} of ${plural(bus.seats(), "seat")} taken, ${reading} in prefill, ${standing} accepted without a seat`;
}

function sequenceRows(bus) {
  const rows = bus.sequences.slice(0, MAX_ROWS).map((one) => [
    one.seat === null ? "none" : one.seat + 1, tenantWords(one.tenant), phaseWords(one.phase), count(one.prompt), count(one.output),
    `${count(one.blocks)} of ${count(one.reserved)}`, one.id || "–",
  ]);
  const more = bus.sequences.length - rows.length;
  return more > 0 ? [...rows, [`${count(more)} more`, "", "", "", "", "", ""]] : rows;
}
