// Line and area charts of the last two minutes, drawn as SVG; words and numbers are HTML, so they keep their size.

import { el, mark, say, svg, TableView } from "./dom.js";
import { HISTORY_MS, PARTS } from "./state.js";
import { figure } from "./words.js";

const tick = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const WIDTH = 1000;
const HEIGHT = 148;
// A gap longer than this is drawn as one.
const MAX_GAP_MS = 4000;

// One chart: `lines` are [kind, name]; `isStacked` draws them as areas on each other.
export class Chart {
  constructor(title, unit, lines, isStacked = false) {
    this.lines = lines;
    this.isStacked = isStacked;
    this.unit = unit;
    this.title = title;
    this.grid = svg("path", { class: "grid" });
    this.drawn = svg("g");
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.grid, this.drawn);
    this.ticks = [0, 1, 2].map((at) => el("span", { class: "y", "data-at": at, "aria-hidden": "true" }));
    const times = ["2 min ago", "1 min", "now"].map((text, at) => el("span", { class: "x", "data-at": at, "aria-hidden": "true" }, text));
    this.nothing = el("p", { class: "nothing" }, "nothing measured yet");
    this.values = lines.map(() => el("b"));
    const legend = lines.map(([kind, name], at) => el("li", {}, sampleOf(kind, isStacked), name, " ", this.values[at]));
    this.table = new TableView(title, [["Time", false], ...lines.map(([, name]) => [`${name}, ${unit}`, true])], "Figures");
    const top = el("div", { class: "chart-top" }, el("h3", {}, title, el("small", {}, unit)), el("ul", { class: "lines", "aria-label": `${title}: now` }, ...legend));
    this.node = el("div", { class: "card chart" }, top, el("div", { class: "plot" }, this.picture, ...this.ticks, ...times, this.nothing), this.table.node);
    mark(this.grid, "d", `M0 0.5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}`);
  }

  // `rows` are [time in ms, values by line]; a value may be null. `nowMs` is at the right end.
  show(rows, nowMs) {
    const heights = rows.map(([, values]) => (this.isStacked ? sum(values) : Math.max(...values.map((value) => value ?? 0))));
    const top = roundTop(Math.max(...heights, 0));
    [0, top / 2, top].forEach((value, at) => say(this.ticks[at], tick.format(value)));
    const x = (atMs) => WIDTH * (1 - (nowMs - atMs) / HISTORY_MS);
    const y = (value) => HEIGHT * (1 - value / top);
    this.drawn.replaceChildren(...(this.isStacked ? this.areas(rows, x, y) : this.curves(rows, x, y)));
    const newest = newestOf(rows, nowMs) ?? this.lines.map(() => null);
    this.lines.forEach((_, at) => say(this.values[at], newest[at] === null ? "–" : figure(newest[at])));
    this.nothing.hidden = rows.some(([, values]) => values.some((value) => value !== null));
    mark(this.picture, "aria-label", `${this.title}, ${this.unit}. Now: ${this.lines.map(([, name], at) => `${name} ${newest[at] === null ? "none" : figure(newest[at])}`).join(", ")}. Highest in two minutes: ${figure(Math.max(...heights, 0))}`);
    this.table.show(() => tableRows(rows, nowMs));
  }

  curves(rows, x, y) {
    return this.lines.map(([kind], line) => {
      let path = "";
      let beforeMs = null;
      for (const [atMs, values] of rows) {
        if (values[line] === null) {
          beforeMs = null;
          continue;
        }
        const pen = beforeMs !== null && atMs - beforeMs < MAX_GAP_MS ? "L" : "M";
        path += `${pen}${x(atMs).toFixed(1)} ${y(values[line]).toFixed(1)}`;
        beforeMs = atMs;
      }
      return svg("path", { class: "line", "data-kind": kind, d: path || "M0 0" });
    });
  }

  areas(rows, x, y) {
    const bands = bandsOf(rows);
    return this.lines.map(([kind], line) => {
      const path = bands.map((band) => {
        const upper = band.map(([atMs, values]) => `${x(atMs).toFixed(1)} ${y(sum(values.slice(0, line + 1))).toFixed(1)}`);
        const lower = band.map(([atMs, values]) => `${x(atMs).toFixed(1)} ${y(sum(values.slice(0, line))).toFixed(1)}`).reverse();
        return `M${[...upper, ...lower].join("L")}Z`;
      });
      return svg("path", { class: "area", "data-kind": kind, d: path.join("") || "M0 0" });
    });
  }
}

// The newest row with values, where it is not too old to stand for now.
function newestOf(rows, nowMs) {
  const measured = rows.filter(([atMs, values]) => nowMs - atMs < MAX_GAP_MS && values.some((value) => value !== null));
  return measured.at(-1)?.[1];
}

// Rows without gaps between them. A second without a step is no gap yet: steps may take longer.
function bandsOf(rows) {
  const bands = [];
  let beforeMs = null;
  for (const row of rows) {
    if (row[1].some((value) => value === null)) continue;
    if (beforeMs === null || row[0] - beforeMs >= MAX_GAP_MS) bands.push([]);
    bands.at(-1).push(row);
    beforeMs = row[0];
  }
  return bands;
}

function tableRows(rows, nowMs) {
  // One row in five: a table is read, not looked at.
  return rows.filter((_, at) => (rows.length - 1 - at) % 5 === 0).reverse().map(([atMs, values]) => [
    `${Math.round((nowMs - atMs) / 1000)} s ago`, ...values.map((value) => (value === null ? "–" : figure(value))),
  ]);
}

function sampleOf(kind, isStacked) {
  const shape = isStacked
    ? svg("rect", { class: "area", "data-kind": kind, width: 20, height: 10, rx: 2 })
    : svg("path", { class: "line", "data-kind": kind, d: "M0 5H20" });
  return svg("svg", { viewBox: "0 0 20 10", "aria-hidden": "true" }, shape);
}

const sum = (values) => values.reduce((all, value) => all + (value ?? 0), 0);

// The next of 1, 2, 4, 5 or 8 times a power of ten, whose half is as easy to read.
function roundTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}

const worst = (latencies, name) => {
  const values = latencies.map((one) => one[name]).filter((value) => value !== undefined);
  return values.length > 0 ? Math.max(...values) : null;
};

// The board's four charts.
export class Charts {
  constructor(node, note) {
    const percentiles = [["p50", "median"], ["p99", "99th percentile"]];
    this.note = note;
    this.first = new Chart("Time to first token", "ms", percentiles);
    this.between = new Chart("Time between tokens", "ms", percentiles);
    this.speed = new Chart("Output", "tokens/s", [["p50", "all requests"]]);
    this.parts = new Chart("Step time by part", "ms", PARTS.map((name, at) => [String(at), name]), true);
    this.all = [this.first, this.between, this.speed, this.parts];
    node.append(...this.all.map((chart) => chart.node));
  }

  show(state, model) {
    const rows = (valuesOf) => state.samples.map((sample) => {
      const seen = [...sample.latencies.values()].filter((one) => !model || one.model === model);
      return [sample.atMs, valuesOf(seen, sample)];
    });
    this.first.show(rows((seen) => [worst(seen, "ttftP50Ms"), worst(seen, "ttftP99Ms")]), state.nowMs);
    this.between.show(rows((seen) => [worst(seen, "interTokenP50Ms"), worst(seen, "interTokenP99Ms")]), state.nowMs);
    this.speed.show(rows((seen) => [seen.length > 0 ? sum(seen.map((one) => one.outputTokensPerS ?? 0)) : null]), state.nowMs);
    this.parts.show(rows((_, sample) => partsOf(sample, model)), state.nowMs);
    const isMany = !model && state.models().length > 1;
    say(this.note, isMany ? "Latencies are the slowest model's, output is all models'. Choose a model to see it alone." : "");
  }
}

// A mean step of the executors that are seen, by part.
function partsOf(sample, model) {
  const seen = sample.steps.filter(([name]) => !model || name === model).map(([, sums]) => sums);
  const steps = sum(seen.map((one) => one.steps));
  if (steps === 0) return PARTS.map(() => null);
  return PARTS.map((name) => sum(seen.map((one) => one.parts.get(name))) / steps);
}
