// What tenants have used today, which the router is asked for now and then.

import { el } from "./dom.js";
import { table, who } from "./queue.js";
import { count, durationText } from "./words.js";

const EVERY_MS = 30_000;
const SYSTEM = "(system)";

export class Costs {
  constructor(node) {
    this.node = node;
    this.usage = null;
    this.askedMs = -EVERY_MS;
    this.shown = null;
  }

  // Asks again when it is due. A router that does not answer is asked the next time.
  async ask(headers, now, onAnswer) {
    if (now - this.askedMs < EVERY_MS) return;
    this.askedMs = now;
    try {
      const response = await fetch(new URL("usage", import.meta.url), { headers, cache: "no-store" });
      if (!response.ok) return;
      this.usage = await response.json();
      onAnswer();
    } catch {
      return;
    }
  }

  clear() {
    this.usage = null;
    this.askedMs = -EVERY_MS;
  }

  show(model) {
    const rows = this.usage === null ? [] : rowsOf(this.usage, model);
    const key = JSON.stringify(rows);
    if (key === this.shown) return;
    this.shown = key;
    if (rows.length === 0) {
      this.node.replaceChildren(el("p", { class: "empty" }, "No usage today."));
      return;
    }
    const cells = rows.map(([tenant, ...figures]) => [who(tenant), ...figures]);
    const names = ["Tenant", "Busy", "Output tokens", this.usage.currency];
    this.node.replaceChildren(table("Usage of today, by tenant", names, cells));
  }
}

// A row for each tenant, the one with the most busy time first. A cost is that of the lines with a price.
function rowsOf(usage, model) {
  const tenants = new Map();
  for (const line of usage.lines ?? []) {
    if (model && line.model !== model) continue;
    const name = line.isSystem ? SYSTEM : line.tenant ?? "";
    const sum = tenants.get(name) ?? { busyNs: 0, output: 0, cost: null };
    sum.busyNs += Number(line.used?.busyNs ?? 0);
    sum.output += Number(line.used?.outputTokens ?? 0);
    if (line.cost !== undefined) sum.cost = (sum.cost ?? 0) + line.cost;
    tenants.set(name, sum);
  }
  return [...tenants]
    .sort(([, one], [, other]) => other.busyNs - one.busyNs)
    .map(([name, sum]) => [name, sum.busyNs || !sum.output ? durationText(sum.busyNs / 1e6) : "–", count(sum.output), sum.cost === null ? "–" : sum.cost.toFixed(2)]);
}
