// Line and area charts of what the router has kept, drawn as SVG; words and numbers are HTML, so they keep their size.

import { el, mark, say, svg, TableView } from "./dom.js";
import { HISTORY_MS } from "./history.js";
import { figure } from "./words.js";

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const WIDTH = 1000;
const HEIGHT = 100;
// A gap of more samples than this is drawn as one.
const MAX_GAP_SAMPLES = 2.5;

// One chart. `lines` are [kind, name]; `style` is "lines" or "areas" on each other; `scale` is "linear" or "log"; `about`
// says what is measured.
export class Chart {
  constructor({ title, unit, lines, about, style = "lines", scale = "linear", least = 0 }) {
    Object.assign(this, { title, unit, lines, style, scale, least });
    this.rows = [];
    this.grid = svg("path", { class: "grid" });
    this.drawn = svg("g");
    this.cross = svg("path", { class: "cross", d: "M0 0" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.grid, this.drawn, this.cross);
    this.ticks = [0, 1, 2].map((at) => el("span", { class: "y", "data-at": at }));
    this.times = [0, 1, 2].map((at) => el("span", { class: "x", "data-at": at }));
    this.nothing = el("p", { class: "nothing" }, "nothing measured in this time");
    this.values = lines.map(() => el("b"));
    this.when = el("span", { class: "when" });
    const legend = lines.map(([kind, name], at) => el("li", {}, sampleOf(kind, style), name, " ", this.values[at]));
    this.table = new TableView(`${title}, ${unit}`, [["Time", false], ...lines.map(([, name]) => [name, true])], "Table");
    this.node = el("div", { class: "card chart", "data-style": style }, this.top(about, legend), this.plot(), this.table.node);
    mark(this.grid, "d", `M0 0.5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}`);
    this.listen();
  }

  top(about, legend) {
    const heading = el("h3", { title: about }, this.title, el("small", {}, this.unit), this.when);
    return el("div", { class: "chart-top" }, heading, el("ul", { class: "lines", "aria-label": `${this.title}: now` }, ...legend));
  }

  plot() {
    const labels = el("div", { class: "ys", "aria-hidden": "true" }, ...this.ticks);
    const times = el("div", { class: "xs", "aria-hidden": "true" }, ...this.times);
    return el("div", { class: "plot" }, labels, el("div", { class: "area-of" }, this.picture, this.nothing), times);
  }

  listen() {
    this.picture.addEventListener("pointermove", (event) => {
      const box = this.picture.getBoundingClientRect();
      this.pointedMs = this.nowMs - this.rangeMs * (1 - (event.clientX - box.left) / Math.max(box.width, 1));
      this.showValues();
    });
    this.picture.addEventListener("pointerleave", () => {
      this.pointedMs = null;
      this.showValues();
    });
  }

  // `rows` are [time in ms, values by line or null]; `nowMs` is at the right end, `rangeMs` before it at the left.
  show(rows, nowMs, rangeMs, sampleMs) {
    Object.assign(this, { nowMs, rangeMs, gapMs: MAX_GAP_SAMPLES * sampleMs });
    this.rows = rows.filter(([atMs, values]) => values !== null && atMs > nowMs - rangeMs - sampleMs);
    const heights = this.rows.map(([, values]) => (this.style === "areas" ? sum(values) : highest(values))).filter((one) => one !== null);
    const scale = this.scale === "log" ? logScale(this.rows.flatMap(([, values]) => values)) : linearScale(Math.max(...heights, this.least));
    scale.ticks.forEach((value, at) => say(this.ticks[at], compact.format(value)));
    [timeWords(rangeMs), timeWords(rangeMs / 2), "now"].forEach((text, at) => say(this.times[at], text));
    const x = (atMs) => Math.max(WIDTH * (1 - (nowMs - atMs) / rangeMs), -WIDTH);
    const y = (value) => HEIGHT * (1 - scale.place(value));
    this.drawn.replaceChildren(...(this.style === "areas" ? this.areas(x, y) : this.curves(x, y)));
    this.nothing.hidden = this.rows.some(([, values]) => values.some((value) => value !== null));
    this.showValues();
    const newest = this.newest() ?? this.lines.map(() => null);
    const words = this.lines.map(([, name], at) => `${name} ${newest[at] === null ? "none" : figure(newest[at])}`);
    mark(this.picture, "aria-label", `${this.title}, ${this.unit}. Now: ${words.join(", ")}. Highest: ${figure(Math.max(...heights, 0))}`);
    this.table.show(() => this.tableRows());
  }

  // The newest row, where it is not too old to stand for now.
  newest() {
    const last = this.rows.at(-1);
    return last !== undefined && this.nowMs - last[0] < 2 * this.gapMs ? last[1] : null;
  }

  // The figures of now, or of the time pointed at.
  showValues() {
    const pointed = this.pointedMs == null ? null : nearest(this.rows, this.pointedMs, this.gapMs);
    const values = (pointed === null ? this.newest() : pointed[1]) ?? this.lines.map(() => null);
    this.lines.forEach((_, at) => say(this.values[at], values[at] === null ? "–" : short(values[at])));
    say(this.when, pointed === null ? "" : agoWords(this.nowMs - pointed[0]));
    const x = pointed === null ? null : (WIDTH * (1 - (this.nowMs - pointed[0]) / this.rangeMs)).toFixed(1);
    mark(this.cross, "d", x === null ? "M0 0" : `M${x} 0V${HEIGHT}`);
  }

  curves(x, y) {
    return this.lines.map(([kind], line) => {
      let path = "";
      let beforeMs = null;
      for (const [atMs, values] of this.rows) {
        if (values[line] === null) {
          beforeMs = null;
          continue;
        }
        const isJoined = beforeMs !== null && atMs - beforeMs < this.gapMs;
        // A single sample between gaps is a dash.
        path += `${isJoined ? "L" : "M"}${x(atMs).toFixed(1)} ${y(values[line]).toFixed(1)}${isJoined ? "" : "h1"}`;
        beforeMs = atMs;
      }
      return svg("path", { class: "line", "data-kind": kind, d: path || "M0 0" });
    });
  }

  areas(x, y) {
    const bands = bandsOf(this.rows, this.gapMs);
    return this.lines.map(([kind], line) => {
      const path = bands.map((band) => {
        const edge = (number) => band.map(([atMs, values]) => `${x(atMs).toFixed(1)} ${y(sum(values.slice(0, number))).toFixed(1)}`);
        return `M${[...edge(line + 1), ...edge(line).reverse()].join("L")}Z`;
      });
      return svg("path", { class: "area", "data-kind": kind, d: path.join("") || "M0 0" });
    });
  }

  // One row in six: a table is read, not looked at.
  tableRows() {
    return this.rows.filter((_, at) => (this.rows.length - 1 - at) % 6 === 0).reverse().map(([atMs, values]) => [
      agoWords(this.nowMs - atMs), ...values.map((value) => (value === null ? "–" : figure(value))),
    ]);
  }
}

function nearest(rows, atMs, withinMs) {
  const found = rows.reduce((best, row) => (best === null || Math.abs(row[0] - atMs) < Math.abs(best[0] - atMs) ? row : best), null);
  return found !== null && Math.abs(found[0] - atMs) <= withinMs ? found : null;
}

// Rows without gaps between them.
function bandsOf(rows, gapMs) {
  const bands = [];
  let beforeMs = null;
  for (const row of rows) {
    if (row[1].some((value) => value === null)) continue;
    if (beforeMs === null || row[0] - beforeMs >= gapMs) bands.push([]);
    bands.at(-1).push(row);
    beforeMs = row[0];
  }
  return bands;
}

function sampleOf(kind, style) {
  const shape = style === "areas"
    ? svg("rect", { class: "area", "data-kind": kind, width: 10, height: 10, rx: 2 })
    : svg("path", { class: "line", "data-kind": kind, d: "M0 5H16" });
  return svg("svg", { viewBox: style === "areas" ? "0 0 10 10" : "0 0 16 10", "data-style": style, "aria-hidden": "true" }, shape);
}

const sum = (values) => values.reduce((all, value) => all + (value ?? 0), 0);
const short = (value) => (Math.abs(value) >= 10_000 ? compact.format(value) : figure(value));

function highest(values) {
  const known = values.filter((value) => value !== null);
  return known.length > 0 ? Math.max(...known) : null;
}

function agoWords(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  return seconds < 120 ? `${seconds} s ago` : `${Math.floor(seconds / 60)} min ${seconds % 60} s ago`;
}

function timeWords(ms) {
  return `−${ms / 60_000} min`;
}

// From 0 to the next of 1, 2, 4, 5 or 8 times a power of ten, whose half is as easy to read.
function linearScale(value) {
  const power = value > 0 ? 10 ** Math.floor(Math.log10(value)) : 1;
  const top = value > 0 ? [1, 2, 4, 5, 8, 10].map((step) => step * power).find((one) => one >= value * 0.999) : 1;
  return { ticks: [0, top / 2, top], place: (one) => one / top };
}

// Whole decades around what there is, two at least, an even number of them so that the middle is a power of ten.
function logScale(values) {
  const known = values.filter((value) => value !== null && value > 0);
  const low = known.length > 0 ? Math.floor(Math.log10(Math.min(...known))) : -1;
  let decades = known.length > 0 ? Math.max(Math.ceil(Math.log10(Math.max(...known))) - low, 1) : 2;
  decades += decades % 2;
  const ticks = [0, 1, 2].map((at) => 10 ** (low + (decades * at) / 2));
  return { ticks, place: (one) => (one > 0 ? Math.max((Math.log10(one) - low) / decades, 0) : 0) };
}

// The highest of the models that are seen: a mean of percentiles means nothing.
const worst = (models, name) => highest(models.map((one) => one[name]));
const total = (models, name) => (models.some((one) => one[name] !== null) ? sum(models.map((one) => one[name])) : null);
const share = (part, whole) => (part === null || !(whole > 0) ? null : (100 * part) / whole);

const FINISHED = [
  ["stop", ["stop_token", "stop_string", "eos", "stop"]],
  ["length", ["length"]],
  ["cancelled", ["cancelled"]],
];
const KNOWN = new Set(FINISHED.flatMap(([, names]) => names));

function finishedOf(models, seconds) {
  const rate = (isMeant) => sum(models.map((one) => sum(Object.entries(one.finished).filter(([name]) => isMeant(name)).map(([, number]) => number)))) / seconds;
  return [...FINISHED.map(([, names]) => rate((name) => names.includes(name))), rate((name) => !KNOWN.has(name)), sum(models.map((one) => one.refused)) / seconds];
}

// A mean step of the executors that are seen, weighted by their steps.
function stepOf(models, name) {
  const measured = models.filter((one) => one[name] !== null && one.steps > 0);
  const steps = sum(measured.map((one) => one.steps));
  return steps > 0 ? sum(measured.map((one) => one[name] * one.steps)) / steps : null;
}

const PERCENTILES = [["p50", "p50"], ["p99", "p99"]];
const CHARTS = [
  [{ title: "Running and waiting", unit: "requests", lines: [["0", "running"], ["p99", "waiting"]], about: "Sequences with a seat, and requests in the queue" },
    (models) => [total(models, "running"), total(models, "waiting")]],
  [{ title: "TTFT", unit: "ms", lines: PERCENTILES, about: "Time from arrival to the first token. Requests of this router" },
    (models) => [worst(models, "ttftP50Ms"), worst(models, "ttftP99Ms")]],
  [{ title: "Inter-token latency", unit: "ms", lines: PERCENTILES, about: "Time between tokens. Requests of this router" },
    (models) => [worst(models, "interTokenP50Ms"), worst(models, "interTokenP99Ms")]],
  [{ title: "Throughput", unit: "tokens/s", lines: [["0", "output"], ["p99", "prompt"]], about: "Output tokens sent, and prompt tokens of requests that got their first seat. Requests of this router" },
    (models, seconds) => [total(models, "outputTokens") / seconds, total(models, "promptTokens") / seconds]],
  [{ title: "KV cache", unit: "% of blocks", lines: [["0", "used"], ["p99", "reserved"]], about: "Blocks that sequences hold, and blocks reserved for them" },
    (models) => ["kvUsed", "kvReserved"].map((name) => share(total(models, name), total(models, "kvTotal")))],
  [{ title: "Prefix cache hits", unit: "% of tokens", lines: [["2", "hits"]], about: "Share of these prompt tokens whose KV was in the prefix cache", least: 10 },
    (models) => [share(total(models, "cachedTokens"), total(models, "promptTokens"))]],
  [{ title: "Step time", unit: "ms, log scale", lines: [["0", "device"], ["p99", "exposed host"]], about: "Mean step: time the device works, and time it waits for the host", scale: "log" },
    (models) => [stepOf(models, "deviceMs"), stepOf(models, "hostMs")]],
  [{ title: "Ended", unit: "requests/s", lines: [["0", "stop"], ["2", "length"], ["3", "cancel"], ["4", "error"], ["5", "refused"]], about: "Ended requests by finish reason, and refused requests. Requests of this router", style: "areas" },
    finishedOf],
];

// The board's charts.
export class Charts {
  constructor(node, note) {
    this.note = note;
    this.rangeMs = HISTORY_MS;
    this.all = CHARTS.map(([options, valuesOf]) => [new Chart(options), valuesOf]);
    node.append(...this.all.map(([chart]) => chart.node));
  }

  show(history, model, manyModels, now) {
    for (const [chart, valuesOf] of this.all) chart.show(history.rows(model, valuesOf), now, this.rangeMs, history.sampleMs);
    const many = !model && manyModels ? " Latencies show the slowest model, counts the sum of all models." : "";
    say(this.note, `Latencies, throughput, prefix cache hits and ended requests cover this router only.${many}`);
  }
}
