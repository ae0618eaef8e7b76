// KV blocks: a thin bar of the whole pool, and below it, enlarged, what is in use by tenant and what is reserved ahead.

import { el, mark, say, svg, TableView } from "./dom.js";
import { tenantColour } from "./palette.js";
import { lookOf } from "./tenants.js";
import { count, percent, tenantWords } from "./words.js";

let numStrips = 0;

export class BlocksStrip {
  constructor(name) {
    this.prefix = `strip${numStrips++}`;
    this.defs = svg("defs");
    this.patterns = new Set();
    this.bars = svg("g");
    this.picture = svg("svg", { class: "strip", role: "img" }, this.defs, this.bars);
    this.whole = svg("svg", { class: "whole-pool", "aria-hidden": "true" });
    this.zoom = el("p", { class: "zoom" });
    this.legend = el("ul", { class: "owners", "aria-label": `Owners of the KV blocks of ${name}` });
    this.sum = el("span");
    this.table = new TableView(`KV blocks of ${name}`, [["Owner", false], ["Blocks", true], ["Share", true]], "Blocks");
    const heading = el("div", { class: "part-heading" }, el("h4", {}, "KV blocks"), this.sum);
    this.node = el("div", {}, heading, this.whole, this.zoom, this.picture, this.legend);
    this.defs.append(this.reservedPattern());
  }

  show(bus) {
    const { total, used, ahead, kept, free } = bus.blocks;
    const owners = [
      ...ownersOf(bus.sequences, used),
      { name: "reserved, not used", blocks: ahead, kind: "reserved" },
      { name: "cached prefixes", blocks: kept, kind: "prefix" },
      { name: "free", blocks: free, kind: "free" },
    ];
    say(this.sum, `${count(used)} in use of ${count(total)} (${percent(used / Math.max(total, 1))})`);
    const words = owners.filter((one) => one.blocks > 0).map((one) => `${one.name} ${count(one.blocks)}`);
    mark(this.picture, "aria-label", `KV blocks of ${bus.name}: ${words.join(", ") || "none"}, of ${count(total)}`);
    this.drawWhole({ total, used, ahead, kept });
    // Where the pool is nearly empty, what is taken fills the strip; kept prefixes and free blocks are in the bar above.
    const taken = used + ahead;
    const isZoomed = taken > 0 && taken < total / 4;
    const drawn = isZoomed ? owners.filter((one) => one.kind !== "free" && one.kind !== "prefix") : owners;
    say(this.zoom, isZoomed ? `zoomed: ${count(taken)} blocks in use or reserved, ${percent(taken / total)} of the pool` : "by owner");
    this.drawBars(drawn, isZoomed ? taken : total);
    this.drawLegend(owners.filter((one) => one.blocks > 0));
    this.table.show(() => owners.map((one) => [one.name, count(one.blocks), percent(one.blocks / Math.max(total, 1))]));
  }

  drawBars(owners, total) {
    const shown = owners.filter((owner) => owner.blocks > 0);
    // What is not nothing is at least so wide, in percent.
    const least = Math.min(1.5, 50 / Math.max(shown.length, 1));
    const widths = shown.map((owner) => Math.max((100 * owner.blocks) / Math.max(total, 1), least));
    const sum = Math.max(widths.reduce((all, width) => all + width, 0), 100);
    let x = 0;
    const bars = shown.map((owner, at) => {
      const width = (100 * widths[at]) / sum;
      const place = { x: `${x.toFixed(2)}%`, y: 0, width: `${width.toFixed(2)}%`, height: 28 };
      x += width;
      return svg("rect", { ...place, class: owner.kind ?? null, "data-part": owner.kind ?? "used", fill: this.fillOf(owner) });
    });
    this.bars.replaceChildren(...bars);
  }

  drawWhole({ total, used, ahead, kept }) {
    let x = 0;
    const parts = [["used", used], ["reserved", ahead], ["prefix", kept]].filter(([, blocks]) => blocks > 0);
    const bars = parts.map(([kind, blocks]) => {
      const width = Math.max((100 * blocks) / Math.max(total, 1), 0.4);
      const bar = svg("rect", { class: `pool-${kind}`, x: `${x.toFixed(2)}%`, width: `${width.toFixed(2)}%`, height: 8 });
      x += width;
      return bar;
    });
    this.whole.replaceChildren(svg("rect", { class: "pool-free", width: "100%", height: 8 }), ...bars);
  }

  drawLegend(owners) {
    const key = owners.map((one) => `${one.name}|${count(one.blocks)}`).join("\n");
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(...owners.map((owner) => el("li", {}, this.swatchOf(owner), `${owner.name} ${count(owner.blocks)}`)));
  }

  swatchOf(owner) {
    if (owner.look) return el("span", { class: "chip", "data-colour": owner.look.colour, "aria-hidden": "true" }, owner.look.initials);
    const shape = svg("rect", { width: 16, height: 16, rx: 3, class: owner.kind, fill: this.fillOf(owner) });
    return svg("svg", { class: "swatch", viewBox: "0 0 16 16", "aria-hidden": "true" }, shape);
  }

  fillOf(owner) {
    if (owner.kind === "reserved") return `url(#${this.prefix}-reserved)`;
    if (!owner.look) return null;
    if (owner.look.pattern === 0) return tenantColour(owner.look);
    const id = `${this.prefix}-${owner.look.colour}-${owner.look.pattern}`;
    if (!this.patterns.has(id)) {
      this.patterns.add(id);
      this.defs.append(tenantPattern(id, owner.look));
    }
    return `url(#${id})`;
  }

  // The theme has changed: patterns carry resolved colours.
  repaint() {
    this.patterns.clear();
    this.legendKey = null;
    this.defs.replaceChildren(this.reservedPattern());
  }

  reservedPattern() {
    return svg(
      "pattern",
      { id: `${this.prefix}-reserved`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 8, height: 8, class: "pattern-back-reserved" }),
      svg("path", { d: "M-2 2 2 -2M0 8 8 0M6 10 10 6", class: "pattern-line-reserved" }),
    );
  }
}

// Blocks that several share count for each holder, so the holders' sums are brought down to what is in use.
function ownersOf(sequences, used) {
  const held = new Map();
  for (const one of sequences) held.set(one.tenant, (held.get(one.tenant) ?? 0) + one.blocks);
  const sum = [...held.values()].reduce((all, blocks) => all + blocks, 0);
  if (sum === 0) return used > 0 ? [{ name: "in use", blocks: used, look: lookOf("") }] : [];
  const owners = [...held].map(([tenant, blocks]) => {
    return { name: tenantWords(tenant), blocks: (used * blocks) / sum, look: lookOf(tenant) };
  });
  return owners.sort((a, b) => b.blocks - a.blocks || a.name.localeCompare(b.name));
}

// Slanted lines, dots or bars, on the tenant's colour.
function tenantPattern(id, look) {
  const marks = [
    [svg("path", { d: "M-2 2 2 -2M0 10 10 0M8 12 12 8", class: "pattern-line" })],
    [svg("circle", { cx: 5, cy: 5, r: 1.6, class: "pattern-dot" })],
    [svg("path", { d: "M5 0V10", class: "pattern-line" })],
  ][look.pattern - 1];
  const back = svg("rect", { width: 10, height: 10, fill: tenantColour(look) });
  return svg("pattern", { id, width: 10, height: 10, patternUnits: "userSpaceOnUse" }, back, ...marks);
}
